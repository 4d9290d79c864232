"""docs/alembic.md: its revisions install and upgrade the schema, and autogenerate leaves it alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION
from tests.docs.pages import blocks, commands, text
from tests.support.database import Database, query
from tests.support.drivers import url
from tests.support.forked import run_module
from tests.support.schemas import meta
from tests.support.sink_actions import register

PAGE = "docs/alembic.md"
FILES = dict(re.findall(r"<!-- run: (\S+) -->\n```python\n(.*?)```\n", text(PAGE), re.DOTALL))
ONLINE = re.compile(r"def run_migrations_online\(\).*?(?=^if context)", re.DOTALL | re.MULTILINE)
MODELS = """
from sqlalchemy import BigInteger, Column, MetaData, Table
target_metadata = MetaData()
Table("orders", target_metadata, Column("id", BigInteger, primary_key=True))
"""
FIRST, SECOND = "5f1c0e2a9b31", "c7d4413e8a02"


def alembic(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Run Alembic in an environment, and return its data and its messages."""
    done = run_module("alembic", words, folder)
    assert (done.code != 0) == (code != 0), f"{words}\n{done.out}\n{done.err}"
    return done.out, done.err


def environment(folder: Path, database: Database, driver: str = "psycopg") -> Path:
    """Make an environment as the page says, with a model of its own."""
    alembic(folder, "init", "migrations")
    address = url(database, driver).render_as_string(hide_password=False)
    settings = (folder / "alembic.ini").read_text()
    (folder / "alembic.ini").write_text(
        re.sub(r"^sqlalchemy\.url = .*$", f"sqlalchemy.url = {address}", settings, flags=re.M)
    )
    env = folder / "migrations" / "env.py"
    made = ONLINE.sub(lambda _: FILES["env.py"] + "\n\n", env.read_text())
    env.write_text(made.replace("target_metadata = None", MODELS))
    for name, content in FILES.items():
        if name.startswith("versions/"):
            (folder / "migrations" / name).write_text(content)
    return env


@pytest.mark.slow  # runs what a page shows
def test_the_page_is_true(empty_database: Database, tmp_path: Path) -> None:
    environment(tmp_path, empty_database)
    for line in [line for block in blocks(PAGE) if block.language == "console" for line in commands(block)]:
        program, *words = shlex.split(line)
        assert program == "alembic"
        alembic(tmp_path, *words)
    assert meta(empty_database) is not None
    assert query(empty_database, "select schema_version from outbox.meta") == [(SCHEMA_VERSION,)]
    assert query(empty_database, "select version_num from alembic_version") == [(SECOND,)]
    assert "nothing to do" in str(migrate(empty_database.dsn))
    alembic(tmp_path, "downgrade", "base")
    assert query(empty_database, "select to_regnamespace('outbox') is null") == [(True,)]


@pytest.mark.slow
def test_autogenerate_leaves_the_schema_alone(empty_database: Database, tmp_path: Path) -> None:
    env = environment(tmp_path, empty_database)
    alembic(tmp_path, "upgrade", "head")
    alembic(tmp_path, "revision", "--autogenerate", "-m", "orders")
    [made] = (tmp_path / "migrations" / "versions").glob("*_orders.py")
    assert "create_table('orders'" in made.read_text()
    assert "outbox" not in made.read_text()
    alembic(tmp_path, "upgrade", "head")
    alembic(tmp_path, "check")
    env.write_text(env.read_text().replace("include_object=outbox.include_object,", ""))
    alembic(tmp_path, "check", code=1)


@pytest.mark.slow
def test_offline_the_script_is_printed(empty_database: Database, tmp_path: Path) -> None:
    environment(tmp_path, empty_database)
    script, _ = alembic(tmp_path, "upgrade", f"base:{FIRST}", "--sql")
    assert query(empty_database, "select to_regnamespace('outbox') is null") == [(True,)]
    with empty_database.connect(autocommit=True) as owner:
        owner.execute(script.encode())
    assert query(empty_database, "select schema_version from outbox.meta") == [(SCHEMA_VERSION,)]
    script, _ = alembic(tmp_path, "upgrade", f"{FIRST}:{SECOND}", "--sql")
    with empty_database.connect(autocommit=True) as owner:
        owner.execute(script.encode())
    script, _ = alembic(tmp_path, "downgrade", f"{FIRST}:base", "--sql")
    assert "drop schema outbox, outbox_internal cascade;" in script


@pytest.mark.slow
def test_a_schema_with_undelivered_events_is_not_dropped(empty_database: Database, tmp_path: Path) -> None:
    environment(tmp_path, empty_database)
    alembic(tmp_path, "upgrade", "head")
    register(empty_database, "crm", "*")
    query(empty_database, "select outbox.emit('t', '{}')")
    _, said = alembic(tmp_path, "downgrade", "base", code=1)
    assert "sink crm has 1 undelivered events or dead letters. Nothing was changed" in said
    assert query(empty_database, "select version_num from alembic_version") == [(SECOND,)]
