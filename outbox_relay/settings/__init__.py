"""Settings: what the file, the environment and the command line say, checked before anything starts.

Call :func:`load` with the path of the TOML file and the environment. The environment wins over the file, the
command line over both. Whatever is wrong is reported at once, in one
:class:`outbox_relay.domain.errors.Misconfigured`, by place and without any value that may be secret.
"""

from __future__ import annotations

from outbox_relay.settings.changes import restart_needed
from outbox_relay.settings.environment import LogSettings, log_settings
from outbox_relay.settings.every_sink import CircuitSettings, RetrySettings
from outbox_relay.settings.exposure import exposures
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.loading import load, warnings
from outbox_relay.settings.model import DatabaseSettings, HttpSettings, RelaySettings, Settings
from outbox_relay.settings.secrets import SigningSecret
from outbox_relay.settings.webhook import WebhookSettings

__all__ = [
    "CircuitSettings",
    "DatabaseSettings",
    "HttpSettings",
    "KafkaSettings",
    "LogSettings",
    "RelaySettings",
    "RetrySettings",
    "Settings",
    "SigningSecret",
    "WebhookSettings",
    "exposures",
    "load",
    "log_settings",
    "restart_needed",
    "warnings",
]
