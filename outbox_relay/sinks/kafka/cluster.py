"""Requests to the brokers, all of which block, and the online check, which creates no topic."""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,  # pyright: ignore[reportPrivateImportUsage] - documented here; the module lacks __all__
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewTopic

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.sinks.kafka.errors import error_of
from outbox_relay.sinks.kafka.settings import ClientLog, ClientSettings

METADATA_SECONDS = 0.25
"""First timeout of a metadata request. Each further one is twice as long."""
MIN_SECONDS = 0.1
CONNECT_SECONDS = 1.0
"""Timeout of a connection to a broker that did not answer."""
MAX_NAMED = 3
"""Maximum number of brokers in a reason."""

NOT_YET = frozenset(("UNKNOWN_TOPIC_OR_PART", "LEADER_NOT_AVAILABLE"))
"""The errors of a topic that is being created."""


class ClusterUnavailable(Exception):
    """The cluster cannot accept events now. The message is the reason."""


class Cluster:
    """The brokers, asked by a client of its own within ``seconds``.

    Metadata requests may create topics with ``create_topics``. Raise ``ClusterUnavailable`` if the settings make no
    client.
    """

    def __init__(
        self, settings: ClientSettings, log: ClientLog, seconds: float, *, create_topics: bool = False
    ) -> None:
        self._log = log
        self._deadline = time.monotonic() + seconds

        # A client that waits for an answer reconnects every few milliseconds: its log lines would flood.
        config: dict[str, Any] = {**settings.admin(create_topics=create_topics), "error_cb": log.failed}
        try:
            self._admin = AdminClient({**config, "log_level": 0}, logger=log)
        except KafkaException as exception:
            raise ClusterUnavailable(settings.describe(error_of(exception))) from None
        except ConfigurationError as reason:
            raise ClusterUnavailable(str(reason)) from None

    @property
    def seconds(self) -> float:
        """Return the time that is left."""
        return max(self._deadline - time.monotonic(), MIN_SECONDS)

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return the metadata of ``topic``, or of all topics. Raise ``ClusterUnavailable`` if no broker answers."""
        log, seconds = self._log, METADATA_SECONDS
        while True:
            began = time.monotonic()
            try:
                return self._admin.list_topics(topic, timeout=min(self.seconds, seconds))
            except KafkaException as exception:
                log.failed(error_of(exception))
                # Ends if the request failed before its timeout, or the timeout was cut by the deadline.
                if time.monotonic() < began + 0.8 * seconds:
                    reason = log.last_error
                    # Serves the client's own errors, such as a refused password: they are the cause.
                    self._admin.poll(0)
                    raise ClusterUnavailable(log.with_certificate_fault(log.last_error or reason or "")) from None
            seconds *= 2

    def configs(self, kind: ResourceType, names: Sequence[str], seconds: float) -> dict[str, Future[dict[str, Any]]]:
        """Return the future settings of topics or brokers, to be passed to ``config_values``."""
        resources = [ConfigResource(kind, name) for name in names]
        asked: dict[Any, Future[dict[str, Any]]] = cast("Any", self._admin).describe_configs(
            resources, request_timeout=seconds
        )
        return {resource.name: found for resource, found in asked.items()}

    def config(self, kind: ResourceType, name: str) -> dict[str, str]:
        """Return the settings of a topic or broker, empty if they cannot be read."""
        seconds = self.seconds
        try:
            return config_values(self.configs(kind, [name], seconds)[name], seconds)
        except (KafkaException, TimeoutError):
            return {}

    def silent(self, brokers: Collection[int]) -> set[int]:
        """Return those of ``brokers``, by id, that do not answer, whatever the answer is."""
        silent, seconds = set[int](), self.seconds
        # A request takes no more than one broker, and goes to that one.
        asked = {id_: self.configs(ResourceType.BROKER, [str(id_)], seconds)[str(id_)] for id_ in brokers}
        for id_, found in asked.items():
            try:
                config_values(found, seconds)
            except TimeoutError:
                silent.add(id_)
            except KafkaException as exception:
                # Errors of the client, and not of a broker, have an underscore.
                if error_of(exception).name().startswith("_"):
                    silent.add(id_)
        if silent:
            self._admin.poll(0)  # serves the errors of connections
        return silent

    def create(self, topics: Sequence[NewTopic]) -> dict[str, KafkaError | None]:
        """Create ``topics`` and return the error of each that failed, None for a missing answer."""
        seconds, errors = self.seconds, dict[str, KafkaError | None]()
        asked: dict[str, Future[None]] = cast("Any", self._admin).create_topics(list(topics), request_timeout=seconds)
        for topic, done in asked.items():
            try:
                done.result(seconds + 1)
            except KafkaException as exception:
                errors[topic] = error_of(exception)
            except TimeoutError:
                errors[topic] = None
        return errors


def config_values(asked: Future[dict[str, Any]], seconds: float) -> dict[str, str]:
    """Wait for settings and return them. Raise KafkaException or TimeoutError."""
    return {setting: str(entry.value) for setting, entry in asked.result(seconds + 1).items()}


# -- the online check ------------------------------------------------------------------------------------------------


class ClusterCheck:
    """The cluster, and ``topic`` on it if there is only one, as they are now.

    ``creates`` is True if the relay creates topics. Raise ``ClusterUnavailable`` if no broker answers.
    """

    def __init__(self, settings: ClientSettings, topic: str | None, seconds: float, *, creates: bool) -> None:
        self._settings = settings
        self._topic = topic
        self._log = ClientLog(settings)
        self._cluster = Cluster(settings, self._log, seconds)
        self._found = self._cluster.metadata(topic)
        self._error = None if topic is None else self._found.topics[topic].error
        self._creates = creates

    def problem(self) -> str | None:
        """Return why the cluster, or the topic, would accept no events now, or None."""
        if (fault := self._unreachable()) is not None:
            return fault
        if (error := self._error) is not None:
            may_be_created = self._creates or self._brokers_create_topics() is not False
            if error.name() not in NOT_YET or not may_be_created:
                return f"topic {self._topic}: {self._settings.describe(error)}"
        if (wanted := self._settings.max_record_bytes) is None:
            return None
        limit, text = self._batch_limit()
        if limit is None or wanted <= limit:
            return None
        return (
            f'producer "message.max.bytes" is {wanted}, but {text}: '
            "raise that one, or lower this one; larger records would be refused"
        )

    def warning(self, payload_bytes: int | None) -> str | None:
        """Return a warning about a missing topic, or about payloads of ``payload_bytes``, which would be refused."""
        if self._error is not None and not self._creates and self._brokers_create_topics() is None:
            unknown = "does not exist, and the brokers do not tell whether they create it for its first record"
            return f"topic {self._topic} {unknown}"
        limits: list[tuple[int, str]] = []
        if (own := self._settings.max_record_bytes) is not None:
            limits.append((own, f'the producer\'s "message.max.bytes" is {own}'))
        limit, text = self._batch_limit()
        if limit is not None:
            limits.append((limit, f"{text}{', compressed' * self._settings.compresses}"))
        if payload_bytes is None or not limits or payload_bytes <= min(limits)[0]:
            return None
        return (
            f"events may have payloads of {payload_bytes} bytes (the ceiling of the database), but {min(limits)[1]}: "
            "raise that limit, or lower the ceiling (migrate --max-payload-bytes); larger events would end dead"
        )

    def _unreachable(self) -> str | None:
        """Return which brokers cannot be reached at the addresses that they advertise, and why, or None."""
        faults: list[str] = []
        for broker in sorted(self._cluster.silent(self._found.brokers))[:MAX_NAMED]:
            host, port = self._found.brokers[broker].host or "", self._found.brokers[broker].port
            if (error := self._log.last_error or "") and f"{host}:{port}/{broker}:" in error:
                faults.append(self._log.with_certificate_fault(error))
                continue
            try:  # brokers may not answer every request
                socket.create_connection((host, port), CONNECT_SECONDS).close()
            except OSError as error:
                faults.append(f"{host}:{port}/{broker}: {error.strerror or error}")
        places = "brokers cannot be reached at the addresses that they advertise (advertised.listeners)"
        return f"{places}: {'; '.join(faults)}" if faults else None

    def _batch_limit(self) -> tuple[int | None, str]:
        """Return the batch limit of the topic if it exists, or else of the brokers, with a text; None if unknown."""
        if self._topic is None or self._error is not None:
            config, name, subject = self._broker_config(), "message.max.bytes", "the brokers take"
        else:
            config = self._cluster.config(ResourceType.TOPIC, self._topic)
            name, subject = "max.message.bytes", f"topic {self._topic} takes"
        limit = config.get(name, "")
        return (int(limit) if limit.isdigit() else None), f"{subject} at most {limit} bytes ({name})"

    def _brokers_create_topics(self) -> bool | None:
        """Return whether brokers create a missing topic for its first record; None if they do not tell."""
        value = self._broker_config().get("auto.create.topics.enable")
        return None if value is None else value == "true"

    def _broker_config(self) -> dict[str, str]:
        return self._cluster.config(ResourceType.BROKER, str(next(iter(self._found.brokers), 0)))
