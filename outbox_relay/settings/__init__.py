"""Settings from the file, the environment and the command line, checked before anything starts.

:func:`load` returns them. The environment takes precedence over the file, the command line over both. All problems are
reported at once, in one :class:`outbox_relay.domain.errors.ConfigurationError`, without any value that may be secret.
"""

from outbox_relay.settings.changes import differing, merged, serving
from outbox_relay.settings.exposure import dsn_faults, exposures, warnings
from outbox_relay.settings.kafka import KafkaSettings
from outbox_relay.settings.loading import load, log_format, log_settings
from outbox_relay.settings.model import Settings
from outbox_relay.settings.sink_tables import PythonSettings
from outbox_relay.settings.webhook import WebhookSettings

__all__ = [
    "KafkaSettings",
    "PythonSettings",
    "Settings",
    "WebhookSettings",
    "differing",
    "dsn_faults",
    "exposures",
    "load",
    "log_format",
    "log_settings",
    "merged",
    "serving",
    "warnings",
]
