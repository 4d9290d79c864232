"""The quick start of README.md: followed from the first step to the last, as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import UUID

import pytest

from tests.docs.reader import SECONDS, Reader
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.records import consume
from tests.support.postgres import PostgresServer
from tests.support.wait import until

TOPIC = "shop.order.created"


@pytest.fixture
def reader(own_postgres: PostgresServer, kafka: KafkaBroker, tmp_path: Path) -> Reader:
    """Return a reader with a database `shop`, on a server where the page's roles do not exist."""
    own_postgres.create_database("shop")
    return Reader("README.md", Database(own_postgres, "shop"), tmp_path, {"localhost:9092": kafka.bootstrap})


def test_the_quick_start_delivers_an_event(reader: Reader, kafka: KafkaBroker) -> None:
    reader.take("python", "outbox.emit")
    reader.take("sh", "pip install '.[relay]'")
    reader.sql("postgres", "create role shop_app")
    [migrated] = reader.command("outbox-relay migrate")
    assert "granted emit to shop_app, relay to relay" in migrated.out
    config = reader.take("toml", "[sinks.events]")
    (reader.place / "relay.toml").write_text(config)
    check, run = reader.take("sh", "outbox-relay check", "outbox-relay run").splitlines()
    assert reader.run(check).code == 0
    assert run == "outbox-relay run -c relay.toml"
    with reader.relay(config):
        [emitted] = reader.command("outbox-relay emit")
        reader.uid = str(UUID(emitted.out.strip()))
        wanted = reader.uid.encode()
        consume(kafka.bootstrap, TOPIC, enough=lambda found: any(r.headers.get("id") == wanted for r in found))
        look = reader.take("sh", "outbox-relay status", "outbox-relay why UID").splitlines()
        until(lambda: _shows_delivery(reader, look), seconds=SECONDS, what="status and why show the delivery")
    assert reader.through


def _shows_delivery(reader: Reader, look: list[str]) -> bool:
    status, why = (reader.run(line).out for line in look)
    delivered = re.search(r"^events +delivered; no record was kept$", why, re.MULTILINE)
    return bool(delivered and re.search(r"^events +0 ", status, re.MULTILINE))
