"""The webhook sink: signed requests over HTTP/1.1, one verdict per event."""

from outbox_relay.sinks.tls import Tls
from outbox_relay.sinks.webhook.http_client import Endpoint, Proxy
from outbox_relay.sinks.webhook.request import Credentials, RequestFormat
from outbox_relay.sinks.webhook.results import ResponsePolicy
from outbox_relay.sinks.webhook.sink import WebhookSink

__all__ = ["Credentials", "Endpoint", "Proxy", "RequestFormat", "ResponsePolicy", "Tls", "WebhookSink"]
