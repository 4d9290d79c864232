"""docs/sqlalchemy.md and docs/asyncpg.md: every block of code is run as it stands there, by a role with its grants."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.docs.pages import text
from tests.support.database import Database, query
from tests.support.drivers import address, url
from tests.support.page_programs import run_python
from tests.support.roles import new_role

PAGES = ("docs/sqlalchemy.md", "docs/asyncpg.md")
UID = UUID(int=7)
"""The event that the blocks about consumers handle, once by each of two consumers."""
MESSAGE = f"""
import types, uuid
uid = uuid.UUID("{UID}")
message = types.SimpleNamespace(headers={{"webhook-id": str(uid)}})
"""
# What a program has around a block, behind what programs of its kind have on the page about emitting.
ALSO = {
    "sqlalchemy": f"""{MESSAGE}
class Invoice(Base):
    __tablename__ = "invoices"
    number: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[uuid.UUID]
    total: Mapped[int]
""",
    "asyncpg": f"""{MESSAGE}
pool = await asyncpg.create_pool(host=found["host"], port=int(found["port"]), user=found["user"],
                                 database=found["dbname"], min_size=1, max_size=2)
""",
}
CONFTEST = {
    "docs/sqlalchemy.md": """
import pytest, sqlalchemy

@pytest.fixture
def engine():
    engine = sqlalchemy.create_engine({url!r})
    yield engine
    engine.dispose()
""",
    "docs/asyncpg.md": """
import asyncpg, pytest_asyncio

@pytest_asyncio.fixture
async def conn():
    conn = await asyncpg.connect(**{address!r})
    yield conn
    await conn.close()
""",
}
WANTED: dict[str, list[tuple[str, str | None]]] = {
    "docs/sqlalchemy.md": [("order.created", f"order-{number}") for number in (1, 2, 3, 4, 5, 6)],
    "docs/asyncpg.md": [("order.created", "order-1"), ("order.changed", "order-1"), ("order.created", "order-2")],
}


def marked(page: str) -> list[tuple[str, str]]:
    """Return kind and text of the blocks of a page."""
    return re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```\n", text(page), re.DOTALL)


@pytest.fixture
def user(database: Database) -> Iterator[str]:
    """Yield a role that may emit, consume, and write the tables of the page."""
    with new_role(database, "app") as user:
        migrate(database.dsn, grants={"emit": [user], "consume": [user]})
        with database.connect() as owner:
            owner.execute("create table orders (id bigint primary key, total integer)")
            owner.execute("create table invoices (number serial primary key, event uuid, total integer)")
            owner.execute(f"grant select, insert, update on all tables in schema public to {user}".encode())
            owner.execute(f"grant usage on all sequences in schema public to {user}".encode())
        yield user


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_true(page: str, database: Database, user: str, tmp_path: Path) -> None:
    for kind, block in marked(page):
        if kind == "pytest":
            run_suite(page, block, database, user, tmp_path)
        else:
            run_python(kind, block, database.dsn_as(user), ALSO[kind])
    assert query(database, "select type, key from outbox.event order by id") == WANTED[page]
    assert query(database, "select event, total from invoices order by total desc") == [(UID, 1250), (UID, 900)]
    assert query(database, "select consumer from outbox.inbox order by 1") == [("audit",), ("billing",)]


def run_suite(page: str, block: str, database: Database, user: str, folder: Path) -> None:
    """Run a block of tests with the fixtures that the page requires."""
    places: dict[str, Any] = {
        "url": url(database, "psycopg").set(username=user).render_as_string(hide_password=False),
        "address": {**address(database), "user": user},
    }
    (folder / "conftest.py").write_text(CONFTEST[page].format(**places))
    (folder / "test_shop.py").write_text(block)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:django", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_run(page: str) -> None:
    assert text(page).count("```") == 2 * len(marked(page))
