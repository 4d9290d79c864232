"""Build Kafka sinks from their settings, and read the settings of their producers again."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_relay.settings import KafkaSettings, Settings
from outbox_relay.sinks import Sink
from outbox_relay.sinks.kafka import ClientSettings, KafkaSink, RecordFormat, TopicCreation

STALL_MIN_SECONDS = 3.0
"""Minimum silence of a broker that counts as a stall; with a longer lease, a third of that."""


def kafka_sink(name: str, settings: KafkaSettings, lease_seconds: float, replay: int | None = None) -> KafkaSink:
    """Return the Kafka sink ``name``, or its client for a ``replay``, not yet open."""
    return KafkaSink(
        name,
        settings.topic_template(),
        settings.producer,
        max(STALL_MIN_SECONDS, lease_seconds / 3),
        record_format=_record_format(settings, replay),
        creation=_topic_creation(settings),
        files=settings.producer_files,
        hold_keys=replay is None and settings.when_dead == "hold" and settings.order == "key",
        topics=settings.topics,
        topics_max=settings.topics_max,
        delivery_details=settings.record_attempts == "all",
    )


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
    if settings.create_topics and settings.partitions and settings.replication_factor:
        return TopicCreation(settings.partitions, settings.replication_factor)
    return None


async def read_producers(sinks: Mapping[str, Sink], settings: Settings) -> list[tuple[KafkaSink, ClientSettings]]:
    """Return each Kafka sink among ``sinks`` with the producer settings that a reload gives it. Apply none of them.

    Raises ``ConfigurationError`` if librdkafka does not accept them, or a file cannot be used.
    """
    return [
        (sink, await sink.validated_settings(kafka.producer, kafka.producer_files))
        for name, sink in sinks.items()
        if isinstance(sink, KafkaSink) and isinstance(kafka := settings.sinks[name], KafkaSettings)
    ]
