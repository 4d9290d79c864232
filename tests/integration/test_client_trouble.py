"""Troubles that a sink's client finds without an event: `status` shows them until the destination answers."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.relay.report import CLIENT
from tests.support.command import inside, outbox_relay
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.broker import QUICK_START
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.certificates import Authority
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
producer = {{ "bootstrap.servers" = "{bootstrap}" }}
[routes]
"*" = ["events"]
"""
OIDC = """
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
"security.protocol" = "SASL_PLAINTEXT"
"sasl.mechanism" = "OAUTHBEARER"
"sasl.oauthbearer.method" = "oidc"
"sasl.oauthbearer.client.id" = "relay"
"sasl.oauthbearer.client.secret" = "hunter2-canary"
"sasl.oauthbearer.token.endpoint.url" = "{url}"
"""


@pytest.fixture
def stopped_kafka() -> Generator[KafkaBroker]:
    """Yield a broker for one test that has not been started, so that nothing listens at its port."""
    broker = KafkaBroker(java=QUICK_START)
    try:
        broker.prepare()
        yield broker
    finally:
        broker.close()


@pytest.fixture
def proxy() -> Generator[Proxy]:
    with Proxy() as proxy:
        yield proxy


def relay_of(database: Database, bootstrap: str, topic: str, directory: Path) -> RelayService:
    """Return a relay with one Kafka sink."""
    return RelayService(directory, CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=bootstrap))


def status(relay: RelayService) -> dict[str, Any]:
    """Return the sink's part of `status --json`."""
    return inside("status", "--json", "-c", relay.config).json["sinks"]["events"]


def is_refused(relay: RelayService) -> bool:
    """Return whether `status` says that nothing listens at the broker's port."""
    said = status(relay)["last_error"] or ""
    return said.startswith(CLIENT) and "Connection refused" in said


@pytest.mark.slow
def test_an_idle_sink_whose_broker_is_down_from_the_start_says_so_until_it_answers(
    database: Database, stopped_kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """No event is there. Nothing listens at the port; then a broker does."""
    with relay_of(database, stopped_kafka.bootstrap, topic, tmp_path) as relay:
        until(lambda: is_refused(relay), seconds=30, what="status says that no broker listens")
        assert status(relay)["circuit"] == "closed"
        stopped_kafka.start()
        until(lambda: status(relay)["last_error"] is None, seconds=30, what="status says no more that it is down")
        stopped_kafka.stop()
        until(lambda: (status(relay)["last_error"] or "").startswith(CLIENT), seconds=30, what="it says so again")
        assert relay.stop() == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("self_signed", "unable to get local issuer certificate"),
        ("good", "invalid_client"),
    ],
)
def test_why_a_token_endpoint_gives_no_token_is_shown(database: Database, tmp_path: Path, kind: str, said: str) -> None:
    """The good one is trusted because the system trusts its authority, and refuses the relay by itself."""
    authority = Authority(tmp_path)
    refusal = say(401, ("content-type", "application/json"), body=b'{"error": "invalid_client"}')
    with Receiver(refusal, tls=getattr(authority, kind)(), secrets=()) as endpoint:
        producer = OIDC.format(bootstrap=f"127.0.0.1:{free_port()}", url=endpoint.url)
        text = CONFIG.format(dsn=database.dsn, topic="t", bootstrap="")
        table = next(line for line in text.splitlines() if line.startswith("producer"))
        text = text.replace(table, "").replace("[routes]", f"{producer}[routes]")
        with RelayService(tmp_path, text, SSL_CERT_FILE=str(authority.certificate_file)) as relay:
            until(lambda: said in (status(relay)["last_error"] or ""), seconds=30, what="status says why")
            assert "hunter2" not in relay.log.read_text()
        relay.config.chmod(0o600)
        check = outbox_relay("check", "--online", "-c", relay.config, SSL_CERT_FILE=str(authority.certificate_file))
    assert check.code == 2
    assert "sinks.events: _AUTHENTICATION: Failed to acquire SASL OAUTHBEARER token: " in check.err
    assert said in check.err
    assert "hunter2" not in check.err
