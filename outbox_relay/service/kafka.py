"""Build Kafka sinks from their settings."""

from __future__ import annotations

from functools import partial

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.settings import KafkaSettings
from outbox_relay.sinks.kafka import KafkaSink, RecordFormat, TopicCreation
from outbox_relay.sinks.kafka.schemas import EventSchemas, SubjectNaming
from outbox_relay.sinks.kafka.settings import TokenProvider

CACHE_SECONDS, MISSING_SECONDS = 300.0, 600.0
"""Time after which a schema is asked for again, and for which events wait for one that is missing, in seconds."""
STALL_MIN_SECONDS = 3.0
"""Minimum silence of a broker that counts as a stall; with a longer lease, a third of that."""


def kafka_sink(name: str, settings: KafkaSettings, lease_seconds: float, replay: int | None = None) -> KafkaSink:
    """Return the Kafka sink ``name``, or its client for a ``replay``, not yet open."""
    return KafkaSink(
        name,
        settings.topic_template(),
        settings.plain_producer,
        max(STALL_MIN_SECONDS, lease_seconds / 3),
        record_format=_record_format(settings, replay),
        creation=_topic_creation(settings),
        secrets={name: partial(secret.read, str) for name, secret in settings.secret_producer.items()},
        hold_keys=replay is None and settings.when_dead == "hold" and settings.order == "key",
        topics=settings.topics,
        delivery_details=settings.record_attempts == "all",
        schemas=_event_schemas(name, settings),
        tokens=_token_provider(name, settings),
    )


def _token_provider(name: str, settings: KafkaSettings) -> TokenProvider | None:
    """Return the provider of tokens, if there is one. Raise ``ConfigurationError`` if it cannot be imported."""
    try:
        return TokenProvider(settings.token_provider) if settings.token_provider else None
    except ConfigurationError as error:
        raise ConfigurationError(f"sinks.{name}.{error}") from None


def _event_schemas(name: str, settings: KafkaSettings) -> EventSchemas | None:
    """Return the schemas of a sink with a registry, or None. Raises ``ConfigurationError`` without its packages."""
    registry, topic = settings.registry, settings.topic_template()
    if not registry.url or registry.format is None:
        return None
    try:
        from outbox_relay.sinks.kafka.registry import RegistryOptions, SchemaRegistry

        options = RegistryOptions(
            registry.url,
            registry.format,
            user_info=None if registry.user_info is None else partial(registry.user_info.read, str),
            ca_file=registry.ca_file,
            client_certificate=registry.client_certificate,
            client_key=registry.client_key,
        )
        source = SchemaRegistry(options)
    except ImportError:
        needs = "needs pip install 'outbox-relay[registry]'"
        raise ConfigurationError(f"sinks.{name}.registry: {needs}") from None
    only = f"{settings.topic}-value" if registry.subject_name_strategy == "topic" and not topic.fields else None
    naming = SubjectNaming(registry.subject_name_strategy, registry.records)
    return EventSchemas(naming, source, CACHE_SECONDS, MISSING_SECONDS, only=only)


def _record_format(settings: KafkaSettings, replay: int | None) -> RecordFormat:
    return RecordFormat(
        settings.partition_header or None,
        settings.tombstones,
        None if settings.cloudevents == "none" else settings.cloudevents,
        settings.cloudevents_source,
        settings.type_header or None,
        replay,
    )


def _topic_creation(settings: KafkaSettings) -> TopicCreation | None:
    creation = settings.create_topics
    return None if creation is None else TopicCreation(creation.partitions, creation.replication_factor)
