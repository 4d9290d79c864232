"""docs/getting-started.md: followed from the first step to the last, as a reader would."""

from __future__ import annotations

import re
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.pages import prose
from tests.docs.reader import SECONDS, Reader
from tests.support.command import inside
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.wait import until

PAGE = "docs/getting-started.md"


@pytest.fixture
def reader(own_postgres: PostgresServer, tmp_path: Path) -> Reader:
    """Return a reader with a database `shop`, on a server where the page's roles do not exist."""
    own_postgres.create_database("shop")
    return Reader(PAGE, Database(own_postgres, "shop"), tmp_path, {"8000": str(free_port())})


@pytest.mark.slow
def test_the_page_is_true(reader: Reader) -> None:
    reader.take("sh", "pip install '.[demo]'", "outbox-relay demo")
    reader.take("sh", "pip install '.[relay]' standardwebhooks")
    reader.sql("postgres", "create role shop_app")
    [migrated] = reader.command("outbox-relay migrate")
    assert "granted emit to shop_app, relay to relay" in migrated.out
    with ExitStack() as stack:
        printed = stack.enter_context(reader.receiver())
        config = reader.take("toml", "[sinks.crm]")
        (reader.place / "relay.toml").write_text(config)
        reader.take("sh", "openssl")
        check = reader.take("sh", "outbox-relay check -c relay.toml --online")
        until(lambda: reader.run(check).code == 0, seconds=SECONDS, what="everything answers")
        assert reader.take("sh") == "outbox-relay run -c relay.toml\n"
        stack.enter_context(reader.relay(config))
        reader.emit()
        reader.sql("shop_app", "update orders", "outbox.emit('order.changed'")
        wanted = ['order.created order-1 {"id":1,"total":"12.34"}', 'order.changed order-1 {"id": 1, "total": "15"}']
        until(lambda: printed.read_text().splitlines() == wanted, seconds=SECONDS, what="the receiver prints both")
        until(lambda: _delivered(reader), seconds=SECONDS, what="the positions of both are written")
        status, why = reader.command("outbox-relay status", "outbox-relay why UID")
        assert re.search(r"^crm +0 ", status.out, re.MULTILINE)
        assert re.search(r"^crm +(delivered|settled)", why.out, re.MULTILINE)
        assert printed.read_text().splitlines() == wanted
    assert {"events", "crm"} == tomllib.loads(reader.take("toml"))["sinks"].keys()
    assert reader.take("sh") == "outbox-relay dev\n"
    assert reader.through


def _delivered(reader: Reader) -> bool:
    found = inside("status", "--json", "--dsn", reader.shop.dsn).json
    return found["sinks"]["crm"]["backlog"] == 0


def test_the_page_says_how_the_receiver_is_started() -> None:
    assert "`python receiver.py`" in prose(PAGE)
