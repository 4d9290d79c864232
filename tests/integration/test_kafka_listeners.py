"""A cluster that answers at the address in the settings, and advertises one that cannot be reached."""

from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from outbox_relay import outbox
from tests.support import ports
from tests.support.command import inside
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.broker import QUICK_START
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""
NOWHERE = "kafka.nowhere.invalid:9092"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Generator[tuple[KafkaBroker, str]]:
    """Yield a broker, and the address of a listener whose advertised address is the parameter."""
    broker, port = KafkaBroker(java=QUICK_START), ports.free_port()
    inner = f"PLAINTEXT://{broker.bootstrap},CONTROLLER://{ports.LOOPBACK}:{broker.controller_port}"
    broker.add_settings(
        {
            "listeners": f"{inner},OUTER://{ports.LOOPBACK}:{port}",
            "advertised.listeners": f"{inner},OUTER://{request.param}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,OUTER:PLAINTEXT",
        }
    )
    if not broker.real:
        broker.close()
        pytest.skip("needs Apache Kafka; the substitute advertises its own address")
    with broker:
        yield broker, f"{ports.LOOPBACK}:{port}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "reason"),
    [(NOWHERE, "Failed to resolve"), (f"{ports.LOOPBACK}:1", "Connection refused")],
    indirect=["broker"],
)
def test_an_advertised_address_that_cannot_be_reached_is_named_with_the_reason(
    database: Database, broker: tuple[KafkaBroker, str], topic: str, tmp_path: Path, reason: str
) -> None:
    kafka, address = broker
    kafka.create_topic(topic, partitions=1)
    relay = RelayService(tmp_path, CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=address))
    ended = inside("check", "--online", "-c", relay.config)
    assert ended.code != 0
    assert "advertised.listeners" in ended.err
    assert reason in ended.err
    with psycopg.connect(database.dsn) as connection:
        outbox.emit(connection, "made", {}, key="k")
    with relay:
        is_open = "select 1 from outbox.sink where circuit <> 'closed'"
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            until(lambda: connection.execute(is_open).fetchone(), seconds=60, what="the sink stands still")
        [found] = [
            finding
            for finding in inside("doctor", "--json", "-c", relay.config).json["findings"]
            if finding["id"] == "destination-down"
        ]
        assert reason in found["evidence"]
        assert relay.stop() == 0
