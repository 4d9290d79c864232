"""Requests to the brokers about topics and settings. All of them block."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
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

from outbox_relay.domain.file_reading import while_reading
from outbox_relay.sinks.kafka.certificate_errors import with_certificate_error
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, error_of

METADATA_SECONDS = 0.25
"""First timeout of a metadata request. Each further one is twice as long."""
MIN_SECONDS = 0.1

NOT_YET = frozenset(("UNKNOWN_TOPIC_OR_PART", "LEADER_NOT_AVAILABLE"))
"""The errors of a topic that is being created."""


class ClusterUnavailable(Exception):
    """The cluster cannot accept events now. The message is the reason."""


def admin_client(settings: ClientSettings, log: ClientLog, *, create_topics: bool) -> AdminClient:
    """Return a client whose metadata requests may create topics with ``create_topics``.

    Raise ``ConfigurationError`` for a file that cannot be used.
    """

    def make() -> AdminClient:
        # A client that waits for an answer reconnects every few milliseconds: its log lines would flood.
        config: dict[str, Any] = {**settings.admin(create_topics=create_topics), **log.callbacks(), "log_level": 0}
        with while_reading("producer"):
            return AdminClient(config, logger=log)

    return settings.reader.call(make)


def cluster_metadata(
    admin: AdminClient,
    log: ClientLog,
    topic: str | None,
    deadline: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> ClusterMetadata:
    """Return the metadata of ``topic``, or of all topics. Repeat the request until the deadline or ``cancelled``.

    Raise ``ClusterUnavailable`` if no broker answers.
    """
    seconds = METADATA_SECONDS
    while True:
        asked_at = time.monotonic()
        try:
            return admin.list_topics(topic, timeout=max(min(deadline - asked_at, seconds), MIN_SECONDS))
        except KafkaException as exception:
            log.failed(error_of(exception))
            # Ends if the request failed before its timeout, or the timeout was cut by the deadline.
            if time.monotonic() < asked_at + 0.8 * seconds or cancelled():
                raise _unavailable(admin, log) from None
        seconds *= 2


def _unavailable(admin: AdminClient, log: ClientLog) -> ClusterUnavailable:
    reason, settings = log.last_error, log.settings
    # Serves the client's own errors, such as a refused password, which replace the last error by the cause.
    admin.poll(0)
    return ClusterUnavailable(
        with_certificate_error(log.last_error or reason or "", settings.authorities, settings.reader)
    )


def topic_configs(admin: AdminClient, topics: Sequence[str], seconds: float) -> dict[str, Future[dict[str, Any]]]:
    """Return the future settings of ``topics``, to be passed to ``config_values``."""
    return _configs(admin, ResourceType.TOPIC, topics, seconds)


def config_values(asked: Future[dict[str, Any]], seconds: float) -> dict[str, str]:
    """Wait for settings and return them. Raise KafkaException or TimeoutError."""
    return {setting: str(entry.value) for setting, entry in asked.result(seconds + 1).items()}


def broker_config(admin: AdminClient, cluster: ClusterMetadata, deadline: float) -> dict[str, str]:
    """Return the settings of one broker, empty if they cannot be read."""
    return _config(admin, ResourceType.BROKER, str(next(iter(cluster.brokers), 0)), deadline)


def topic_config(admin: AdminClient, topic: str, deadline: float) -> dict[str, str]:
    """Return the settings of ``topic``, empty if they cannot be read."""
    return _config(admin, ResourceType.TOPIC, topic, deadline)


def _config(admin: AdminClient, kind: ResourceType, name: str, deadline: float) -> dict[str, str]:
    seconds = max(deadline - time.monotonic(), MIN_SECONDS)
    try:
        return config_values(_configs(admin, kind, [name], seconds)[name], seconds)
    except (KafkaException, TimeoutError):
        return {}


def _configs(
    admin: AdminClient, kind: ResourceType, names: Sequence[str], seconds: float
) -> dict[str, Future[dict[str, Any]]]:
    describe = cast("Any", admin).describe_configs
    asked: dict[Any, Future[dict[str, Any]]] = describe(
        [ConfigResource(kind, name) for name in names], request_timeout=seconds
    )
    return {resource.name: found for resource, found in asked.items()}


def silent_brokers(admin: AdminClient, brokers: Collection[int], seconds: float) -> set[int]:
    """Return those of ``brokers``, by id, that do not answer within ``seconds``, whatever the answer is."""
    silent: set[int] = set()
    # A request takes no more than one broker, and goes to that one.
    asked = {id_: _configs(admin, ResourceType.BROKER, [str(id_)], seconds)[str(id_)] for id_ in brokers}
    for id_, found in asked.items():
        try:
            config_values(found, seconds)
        except TimeoutError:
            silent.add(id_)
        except KafkaException as exception:
            # Errors of the client, and not of a broker, have an underscore.
            if error_of(exception).name().startswith("_"):
                silent.add(id_)
    return silent


def create_topics(admin: AdminClient, topics: Sequence[NewTopic], seconds: float) -> dict[str, KafkaError | None]:
    """Create ``topics`` and return the error of each that failed, None for a missing answer."""
    asked: dict[str, Future[None]] = cast("Any", admin).create_topics(list(topics), request_timeout=seconds)
    errors: dict[str, KafkaError | None] = {}
    for topic, done in asked.items():
        try:
            done.result(seconds + 1)
        except KafkaException as exception:
            errors[topic] = error_of(exception)
        except TimeoutError:
            errors[topic] = None
    return errors
