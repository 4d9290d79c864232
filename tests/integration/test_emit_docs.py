"""docs/emitting.md: every block of code is run as it stands there, by an application's role with its grants alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.page_programs import run_python
from tests.support.postgres import PostgresServer
from tests.support.roles import new_role

PAGE = Path(__file__).parents[2] / "docs" / "emitting.md"
BLOCKS = re.findall(r"<!-- run: ([a-z ]+) -->\n```(\w+)\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)

# What each block emits, in the order of the page: type and key.
WANTED: list[list[tuple[str, str | None]]] = [
    [("order.created", "order-1")],
    [("order.paid", "order-1")],
    [("order.created", "order-1")],
    [("order.created", "order-1")],
    [("order.created", "order-2")],
    [("order.changed", "order-1"), ("order.changed", "order-2")],
    [("order.created", "order-3")],
    [("order.paid", "order-2")],
    [("label.printed", "order-2")],
    [("order.created", "order-4")],
    [("order.created", "order-5")],
    [("order.created", "order-6")],
    [("order.created", "order-7")],
    [("order.created", "order-8")],
    [],  # the trigger
    [("order.created", "order-9")],
    [("order.paid", "order-2")],
    [("order.paid", "order-2")],
    [("order.reminder", "order-2")],
    [("order.reminder", "order-1")],
    [("order.reminder", "order-2")],  # moved, then cancelled
    [("order.reminder", None)],
    [("report.rebuild", None)],  # once for its unique key
    [("order.noted", "order-1")],
    [],  # the limit of the payload
    [("order.created", "order-10")],
]


@pytest.fixture
def shop(postgres: PostgresServer, template: str) -> Iterator[Database]:
    """Yield a database of the name that the page uses."""
    postgres.create_database("shop", template=template)
    try:
        yield Database(postgres, "shop")
    finally:
        postgres.drop_database("shop")


def run(kind: str, language: str, block: str, shop: Database, user: str) -> None:
    """Run a block of the page."""
    if language == "python":
        return run_python(kind, block, shop.dsn_as(user))
    with shop.connect(user="postgres" if kind.startswith("superuser") else user, autocommit=True) as conn:
        if not kind.startswith("prepare"):
            conn.execute(block.encode())
            return None
        for statement in block.split(";\n"):  # refused among several at once
            if statement:
                conn.execute(statement.encode())
    return None


def emitted(shop: Database, after: int) -> list[tuple[Any, ...]]:
    """Return id, type and key of the events after this id."""
    with shop.connect() as conn:
        return conn.execute("select id, type, key from outbox.event where id > %s order by id", [after]).fetchall()


@pytest.mark.slow  # runs what a page shows
def test_the_page_is_true(shop: Database) -> None:
    with new_role(shop, "app") as user, shop.connect(autocommit=True) as conn:
        conn.execute(f"grant create on schema public to {user}".encode())
        migrate(shop.dsn, grant_emit=[user])
        with shop.connect(user=user, autocommit=True) as app:
            app.execute("create table orders (id bigint primary key, total integer)")
        last = 0
        for (kind, language, block), wanted in zip(BLOCKS, WANTED, strict=True):
            run(kind, language, block, shop, user)
            found = emitted(shop, last)
            assert [(type_, key) for _, type_, key in found] == wanted, block
            last = found[-1][0] if found else last
        check_the_trigger(shop, user, last)
        with shop.connect() as fresh:
            assert fresh.execute("show outbox.max_payload_bytes").fetchone() == ("524288",)


def check_the_trigger(shop: Database, user: str, last: int) -> None:
    """Assert that the page's trigger emits too, and does not when the change is rolled back."""
    with shop.connect(user=user) as conn:
        conn.execute("insert into orders values (11, 1)")
        conn.rollback()
        conn.execute("update orders set total = 5 where id = 6")
    assert [(type_, key) for _, type_, key in emitted(shop, last)] == [("order.update", "order-6")]


def test_every_block_of_code_is_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(BLOCKS)
    assert len(BLOCKS) == len(WANTED)
