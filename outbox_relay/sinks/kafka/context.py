"""The parts that the stages of a delivery share."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_relay.sinks.kafka.call import KeyBlocks
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.event_schemas import EventSchemas
from outbox_relay.sinks.kafka.in_flight_messages import InFlightMessages
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.send_filter import SendFilter
from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers
from outbox_relay.sinks.kafka.topic_metadata import TopicMetadata
from outbox_relay.sinks.kafka.topic_resolver import TopicResolver

LATE = "not handed to Kafka's client in time"
"""The reason for events that are left when the time of their call is over."""


@dataclass(frozen=True, slots=True)
class ThreadContext:
    """The settings and the state of one producer thread."""

    settings: ClientSettings
    log: ClientLog
    topics: TopicResolver
    record_format: RecordFormat
    stall_seconds: float
    metadata: TopicMetadata
    breakers: TopicBreakers
    blocks: KeyBlocks
    in_flight: InFlightMessages
    send_filter: SendFilter
    schemas: EventSchemas | None = None
    """The schemas of events, or None for a sink without a schema registry."""
