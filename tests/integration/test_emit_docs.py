"""docs/emitting.md: every block of code is run as it stands there, by an application's role with its grants alone."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.roles import new_role

PAGE = Path(__file__).parents[2] / "docs" / "emitting.md"
BLOCKS = re.findall(r"<!-- run: ([a-z ]+) -->\n```(\w+)\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SECONDS = 60

# What a reader's program has around a block. `dsn` is a connection string of libpq.
AROUND = {
    "psycopg": """
        import functools, json, uuid
        from datetime import UTC, datetime, timedelta
        from decimal import Decimal
        import psycopg
        from outbox_relay import outbox
    """,
    "sqlalchemy": """
        from sqlalchemy import URL, create_engine
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
        class Base(DeclarativeBase): ...
        class Order(Base):
            __tablename__ = "orders"
            id: Mapped[int] = mapped_column(primary_key=True)
            total: Mapped[int]
        engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
        found = conninfo_to_dict(dsn)
        async_engine = create_async_engine(URL.create(
            "postgresql+asyncpg", host=found["host"], port=int(found["port"]), username=found["user"],
            database=found["dbname"]))
    """,
    "django": """
        import json
        import django
        from django.conf import settings
        from django.db import connection, models, transaction
        from psycopg.conninfo import conninfo_to_dict
        found = conninfo_to_dict(dsn)
        settings.configure(DATABASES={"default": {
            "ENGINE": "django.db.backends.postgresql", "NAME": found["dbname"], "USER": found["user"],
            "HOST": found["host"], "PORT": found["port"]}})
        django.setup()
        class Order(models.Model):
            id = models.BigIntegerField(primary_key=True)
            total = models.IntegerField()
            class Meta:
                app_label = "shop"
                db_table = "orders"
    """,
    "asyncpg": """
        import asyncpg
        from psycopg.conninfo import conninfo_to_dict
        found = conninfo_to_dict(dsn)
        conn = await asyncpg.connect(host=found["host"], port=int(found["port"]), user=found["user"],
                                     database=found["dbname"])
    """,
}

# What each block emits, in the order of the page: type and key.
WANTED: list[list[tuple[str, str]]] = [
    [("order.created", "order-1")],
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
    [("order.noted", "order-1")],
    [],  # the limit of the payload
    [("order.created", "order-10")],
]


@pytest.fixture
def shop(postgres: PostgresServer, template: str) -> Iterator[Database]:
    """A database of the name that the page uses."""
    postgres.create_database("shop", template=template)
    try:
        yield Database(postgres, "shop")
    finally:
        postgres.drop_database("shop")


def run_python(kind: str, block: str, dsn: str) -> None:
    """Run a block in an interpreter of its own; every warning is an error there."""
    program = textwrap.dedent(AROUND[kind]) + "\n" + block
    if "await " in program:
        program = f"import asyncio\nasync def main():\n{textwrap.indent(program, '    ')}\nasyncio.run(main())\n"
    command = [sys.executable, "-W", "error", "-c", f"dsn = {dsn!r}\n{program}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{block}\n{done.stderr}"


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
    """id, type and key of the events after this id."""
    with shop.connect() as conn:
        return conn.execute("select id, type, key from outbox.event where id > %s order by id", [after]).fetchall()


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
    """The trigger that the page has made emits too, and not when the change is rolled back."""
    with shop.connect(user=user) as conn:
        conn.execute("insert into orders values (11, 1)")
        conn.rollback()
        conn.execute("update orders set total = 5 where id = 6")
    assert [(type_, key) for _, type_, key in emitted(shop, last)] == [("order.update", "order-6")]


def test_every_block_of_code_is_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(BLOCKS)
    assert len(BLOCKS) == len(WANTED)
