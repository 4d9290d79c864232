"""The blocks of Python on a page, run as a reader's program around them."""

from __future__ import annotations

import textwrap

from tests.support.forked import run_text

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


def run_python(kind: str, block: str, dsn: str, also: str = "") -> None:
    """Run a block in a process of its own; every warning is an error there. `also` comes before the block."""
    program = f"{textwrap.dedent(AROUND[kind])}\n{textwrap.dedent(also)}\n{block}"
    if "await " in program:
        program = f"import asyncio\nasync def main():\n{textwrap.indent(program, '    ')}\nasyncio.run(main())\n"
    ended = run_text(f"dsn = {dsn!r}\n{program}")
    assert ended.code == 0, f"{block}\n{ended.err}"
