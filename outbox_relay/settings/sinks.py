"""The tables ``[sinks.NAME]``: their names, and which model each is by its ``type``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Discriminator

from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.webhook import WebhookSettings

SINK_NAME = re.compile(r"(?!.*__)[a-z][a-z0-9_]{0,39}")
"""A sink's name: it is part of variables' names, in which ``__`` separates."""

Sink = Annotated[KafkaSettings | WebhookSettings, Discriminator("type")]
"""A table ``[sinks.NAME]``; which one it is stands in its ``type``."""

SINKS: dict[str, type[KafkaSettings] | type[WebhookSettings]] = {"kafka": KafkaSettings, "webhook": WebhookSettings}
"""The models of sinks by their ``type``."""


def check_sink_name(name: Any) -> Any:
    """``name`` if it is one for a sink. Raises ValueError otherwise."""
    if not isinstance(name, str) or not SINK_NAME.fullmatch(name):
        raise ValueError("a sink's name is 1 to 40 of a-z, 0-9 and _, begins with a letter and holds no __")
    return name
