"""The online check of a Kafka sink. It creates no topic."""

from __future__ import annotations

import socket
import time

from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,  # pyright: ignore[reportPrivateImportUsage] - documented here; the module lacks __all__
)

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.sinks.kafka.certificate_errors import with_certificate_error
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.cluster_queries import (
    MIN_SECONDS,
    NOT_YET,
    ClusterUnavailable,
    admin_client,
    broker_config,
    cluster_metadata,
    silent_brokers,
    topic_config,
)

CONNECT_SECONDS = 1.0
"""Timeout of a connection to a broker that did not answer."""
MOST_NAMED = 3
"""Maximum number of brokers in a reason."""


def check(settings: ClientSettings, topic: str | None, seconds: float, *, creates: bool) -> str | None:
    """Return why the cluster, or ``topic`` on it, would accept no events now, or None.

    ``creates`` is True if the relay creates topics.
    """
    log = ClientLog(settings)
    deadline = time.monotonic() + seconds
    try:
        admin = admin_client(settings, log, create_topics=False)
        found = cluster_metadata(admin, log, topic, deadline)
    except (ClusterUnavailable, ConfigurationError) as reason:
        return str(reason)
    if (fault := _unreachable(admin, log, found, deadline)) is not None:
        return fault
    error = found.topics[topic].error if topic is not None else None
    if error is None:
        return _record_size_problem(settings, admin, found, topic, deadline)
    if error.name() in NOT_YET and (creates or _broker_creates_topics(admin, found, deadline) is not False):
        return _record_size_problem(settings, admin, found, None, deadline)
    return f"topic {topic}: {settings.describe(error)}"


def _unreachable(admin: AdminClient, log: ClientLog, cluster: ClusterMetadata, deadline: float) -> str | None:
    """Return which brokers cannot be reached at the addresses that they advertise, and why, or None."""
    silent = silent_brokers(admin, cluster.brokers, max(deadline - time.monotonic(), MIN_SECONDS))
    admin.poll(0)  # serves the errors of connections
    settings, faults = log.settings, list[str]()
    for broker in sorted(silent)[:MOST_NAMED]:
        host, port = cluster.brokers[broker].host or "", cluster.brokers[broker].port
        if (error := log.last_error or "") and f"{host}:{port}/{broker}:" in error:
            faults.append(with_certificate_error(error, settings.authorities, settings.reader))
        elif fault := _connection_fault(host, port):
            faults.append(f"{host}:{port}/{broker}: {fault}")
    if not faults:
        return None
    return f"brokers cannot be reached at the addresses that they advertise (advertised.listeners): {'; '.join(faults)}"


def _connection_fault(host: str, port: int) -> str | None:
    """Return why no connection can be opened, or None: brokers may not answer every request."""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def online_warning(
    settings: ClientSettings, topic: str | None, payload_bytes: int | None, seconds: float, *, creates: bool
) -> str | None:
    """Return a warning about a missing topic, or about payloads of ``payload_bytes``, which would be refused; or None.

    ``creates`` is True if the relay creates topics.
    """
    log = ClientLog(settings)
    deadline = time.monotonic() + seconds
    try:
        admin = admin_client(settings, log, create_topics=False)
        found = cluster_metadata(admin, log, topic, deadline)
    except (ClusterUnavailable, ConfigurationError):
        return None
    error = None if topic is None else found.topics[topic].error
    if error is not None and not creates and _broker_creates_topics(admin, found, deadline) is None:
        return f"topic {topic} does not exist, and the brokers do not tell whether they create it for its first record"
    if payload_bytes is None:
        return None
    existing = None if error is not None else topic
    limits: list[tuple[int, str]] = []
    if (own := settings.max_record_bytes) is not None:
        limits.append((own, f'the producer\'s "message.max.bytes" is {own}'))
    limit, text = _batch_limit(admin, found, existing, deadline)
    if limit is not None:
        limits.append((limit, f"{text}{', compressed' * settings.compresses}"))
    lowest, text = min(limits, default=(payload_bytes, ""))
    if payload_bytes <= lowest:
        return None
    return (
        f"events may have payloads of {payload_bytes} bytes (the ceiling of the database), but {text}: "
        "raise that limit, or lower the ceiling (migrate --max-payload-bytes); larger events would end dead"
    )


def _record_size_problem(
    settings: ClientSettings, admin: AdminClient, cluster: ClusterMetadata, topic: str | None, deadline: float
) -> str | None:
    """Return why records of the user's maximum size would be refused, or None if not or unknown."""
    wanted = settings.max_record_bytes
    if wanted is None:
        return None
    limit, text = _batch_limit(admin, cluster, topic, deadline)
    if limit is None or wanted <= limit:
        return None
    return (
        f'producer "message.max.bytes" is {wanted}, but {text}: '
        "raise that one, or lower this one; larger records would be refused"
    )


def _batch_limit(
    admin: AdminClient, cluster: ClusterMetadata, topic: str | None, deadline: float
) -> tuple[int | None, str]:
    """Return the batch limit of ``topic``, or else of the brokers, with a text; None if it is unknown."""
    if topic is None:
        config, name, subject = broker_config(admin, cluster, deadline), "message.max.bytes", "the brokers take"
    else:
        config, name, subject = topic_config(admin, topic, deadline), "max.message.bytes", f"topic {topic} takes"
    limit = config.get(name, "")
    return (int(limit) if limit.isdigit() else None), f"{subject} at most {limit} bytes ({name})"


def _broker_creates_topics(admin: AdminClient, cluster: ClusterMetadata, deadline: float) -> bool | None:
    """Return whether brokers create a missing topic for its first record; None if they do not tell."""
    value = broker_config(admin, cluster, deadline).get("auto.create.topics.enable")
    return None if value is None else value == "true"
