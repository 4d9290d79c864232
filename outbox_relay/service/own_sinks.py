"""The types of sinks that the relay itself has, as its entry points name them.

This module imports no client of a destination: settings are read by every command, and sinks made by few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_relay.settings import KafkaSettings, PythonSettings, Settings, WebhookSettings
from outbox_relay.sinks import Sink, SinkContext
from outbox_relay.sinks.door import SinkType

if TYPE_CHECKING:
    from outbox_relay.service.webhooks import Webhooks


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnContext(SinkContext):
    """The place of a sink, with what only the relay's own types get: all settings, and the maker of webhook sinks."""

    settings: Settings
    webhooks: Webhooks


def _kafka(settings: KafkaSettings, context: OwnContext) -> Sink:
    from outbox_relay.service.kafka import kafka_sink

    return kafka_sink(context.name, settings, context.settings.relay.lease_seconds, context.replay)


def _webhook(_settings: WebhookSettings, context: OwnContext) -> Sink:
    if context.replay is None or context.slots is None:
        return context.webhooks.make(context.name)
    return context.webhooks.make_for_replay(context.name, context.replay, context.slots)


def _python(settings: PythonSettings, context: OwnContext) -> Sink:
    from outbox_relay.service.python_sinks import python_sink

    return python_sink(context.name, context.settings, settings, context.replay, context.slots)


KAFKA = SinkType("kafka", KafkaSettings, _kafka)
WEBHOOK = SinkType("webhook", WebhookSettings, _webhook)
PYTHON = SinkType("python", PythonSettings, _python)
