"""The makers of Kafka sinks and webhooks, as ``outbox_relay.sinks.types`` names them.

Each imports the client of its destination when a sink is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_relay.settings import KafkaSettings, Settings, WebhookSettings
from outbox_relay.sinks import Sink, SinkContext

if TYPE_CHECKING:
    from outbox_relay.service.webhooks import Webhooks


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayContext(SinkContext):
    """The place of a sink, with what only the relay's own types get: all settings, and the maker of webhook sinks."""

    settings: Settings
    webhooks: Webhooks


def kafka(settings: KafkaSettings, context: RelayContext) -> Sink:
    """Return a Kafka sink."""
    from outbox_relay.sinks.kafka import kafka_sink

    return kafka_sink(context.name, settings, context.settings.relay.lease_seconds, context.replay)


def webhook(_settings: WebhookSettings, context: RelayContext) -> Sink:
    """Return a webhook sink."""
    return context.webhooks.make(context.name, context.replay, context.slots)
