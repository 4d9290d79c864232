"""Requests to the brokers, all of which block, and the online check, which creates no topic."""

from __future__ import annotations

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
        try:
            config: dict[str, Any] = {**settings.admin(create_topics=create_topics), "error_cb": log.failed}
            # A client that waits for an answer reconnects every few milliseconds: its log lines would flood.
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
                    raise ClusterUnavailable(log.last_error or reason or "") from None
            seconds *= 2

    def config(self, kind: ResourceType, name: str, seconds: float | None = None) -> dict[str, str]:
        """Return the settings of a topic or broker. Raise KafkaException or TimeoutError if they cannot be read."""
        seconds = self.seconds if seconds is None else seconds
        resource = ConfigResource(kind, name)
        asked: Future[dict[str, Any]] = cast("Any", self._admin).describe_configs([resource], request_timeout=seconds)[
            resource
        ]
        return {setting: str(entry.value) for setting, entry in asked.result(seconds + 1).items()}

    def silent(self, brokers: Collection[int]) -> bool:
        """Return True if one of ``brokers``, given by id, does not answer, whatever the answer is."""
        for broker in brokers:
            try:
                self.config(ResourceType.BROKER, str(broker))
            except TimeoutError:
                return True
            except KafkaException as exception:
                # Errors of the client, and not of a broker, have an underscore.
                if error_of(exception).name().startswith("_"):
                    self._admin.poll(0)  # serves the errors of connections
                    return True
        return False

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
        if self._cluster.silent(self._found.brokers):
            places = "brokers cannot be reached at the addresses that they advertise (advertised.listeners)"
            return f"{places}: {self._log.last_error or ', '.join(map(str, self._found.brokers.values()))}"
        if (error := self._error) is not None:
            may_be_created = self._creates or self._brokers_create_topics() is not False
            if error.name() not in NOT_YET or not may_be_created:
                return f"topic {self._topic}: {self._settings.describe(error)}"
        own, (limit, text) = self._settings.max_record_bytes, self._batch_limit()
        if own is None or limit is None or own <= limit:
            return None
        return (
            f'producer "message.max.bytes" is {own}, but {text}: '
            "raise that one, or lower this one; larger records would be refused"
        )

    def warning(self, payload_bytes: int | None) -> str | None:
        """Return a warning about a missing topic, or about payloads of ``payload_bytes``, which would be refused."""
        if self._error is not None and not self._creates and self._brokers_create_topics() is None:
            unknown = "does not exist, and the brokers do not tell whether they create it for its first record"
            return f"topic {self._topic} {unknown}"
        limit, text = self._batch_limit()
        own = self._settings.max_record_bytes
        if own is not None and (limit is None or own < limit):
            limit, text = own, f'the producer\'s "message.max.bytes" is {own}'
        if payload_bytes is None or limit is None or payload_bytes <= limit:
            return None
        return (
            f"events may have payloads of {payload_bytes} bytes (the ceiling of the database), but {text}: "
            "raise that limit, or lower the ceiling (migrate --max-payload-bytes); larger events would end dead"
        )

    def _batch_limit(self) -> tuple[int | None, str]:
        """Return the batch limit of the topic if it exists, or else of the brokers, with a text; None if unknown."""
        if self._topic is None or self._error is not None:
            config, name, subject = self._broker_config(), "message.max.bytes", "the brokers take"
        else:
            config, name, subject = self._config(ResourceType.TOPIC, self._topic), "max.message.bytes", ""
            subject = f"topic {self._topic} takes"
        limit, compressed = config.get(name, ""), ", compressed" * self._settings.compresses
        return (int(limit) if limit.isdigit() else None), f"{subject} at most {limit} bytes ({name}){compressed}"

    def _brokers_create_topics(self) -> bool | None:
        """Return whether brokers create a missing topic for its first record; None if they do not tell."""
        value = self._broker_config().get("auto.create.topics.enable")
        return None if value is None else value == "true"

    def _broker_config(self) -> dict[str, str]:
        return self._config(ResourceType.BROKER, str(next(iter(self._found.brokers), 0)))

    def _config(self, kind: ResourceType, name: str) -> dict[str, str]:
        try:
            return self._cluster.config(kind, name)
        except (KafkaException, TimeoutError):
            return {}
