"""The models of the relay's own sinks, by their types."""

from outbox_relay.settings import KafkaSettings, PythonSettings, WebhookSettings

SINKS = {"kafka": KafkaSettings, "webhook": WebhookSettings, "python": PythonSettings}
