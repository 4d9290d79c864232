"""Configuration files of relays that tests run as processes."""

from __future__ import annotations

from pathlib import Path

from outbox_relay.workbench.embedded.broker import Broker
from tests.support.receiver import Receiver
from tests.support.receiver.signatures import SECRET

KAFKA = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = {lease}
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""
WEBHOOK = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = [{{ file = "{directory}/secrets" }}]
headers = {{ x-tenant = "one" }}
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"a.*" = ["crm"]
"""
WEBHOOK_WITH_FILES = """
[database]
{database}
[relay]
lease_seconds = 3
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = [{{ file = "{directory}/secrets" }}]
headers = {{ authorization = {{ env = "CRM_TOKEN" }}, x-tenant = {{ file = "{directory}/tenant" }} }}
permanent_statuses = [400]
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"*" = ["crm"]
"""
KAFKA_AND_WEBHOOK = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = 2
[sinks.crm.retry]
attempts = 4
base_seconds = 0.1
max_seconds = 0.5
[sinks.crm.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[routes]
"*" = ["events", "crm"]
"""


def kafka_config(dsn: str, kafka: Broker, topic: str, lease_seconds: int = 15) -> str:
    """Return a configuration with one Kafka sink for every type."""
    return KAFKA.format(dsn=dsn, lease=lease_seconds, topic=topic, bootstrap=kafka.bootstrap)


def webhook_config(dsn: str, receiver: Receiver, directory: Path) -> str:
    """Return a configuration with one webhook for types that begin with ``a.``, and write its secret."""
    (directory / "secrets").write_text(SECRET)
    return WEBHOOK.format(dsn=dsn, url=receiver.url, directory=directory)


def webhook_with_files_config(database: str, url: str, directory: Path) -> str:
    """Return a configuration with one webhook for every type, and write its secret and the value of a header.

    ``database`` is the content of the table ``[database]``. Another header needs the variable ``CRM_TOKEN``.
    """
    (directory / "secrets").write_text(SECRET)
    (directory / "tenant").write_text("one\n")
    return WEBHOOK_WITH_FILES.format(database=database, url=url, directory=directory)


def kafka_and_webhook_config(dsn: str, bootstrap: str, topic: str, url: str) -> str:
    """Return a configuration that routes every type to a Kafka sink and a webhook."""
    return KAFKA_AND_WEBHOOK.format(dsn=dsn, topic=topic, bootstrap=bootstrap, url=url, secret=SECRET)
