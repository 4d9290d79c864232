"""The schema of a possible next release, and the version of a schema."""

import shutil
from pathlib import Path

from outbox_relay.postgres.schema_versions import SCHEMA_FOLDER, newest_version
from tests.support.database import Database

EXTRA = """alter table outbox.event add column extra text;
alter table outbox.sink add column extra integer;
create table outbox.extra (id bigint primary key);
"""


def next_schema(place: Path) -> Path:
    """Copy the schema into `place`, with further columns, a table and a function; return `place`."""
    shutil.copytree(SCHEMA_FOLDER, place)
    add_migration(place, EXTRA)
    (place / "functions" / "extra.sql").write_text(
        "create or replace function outbox_internal.extra() returns integer language sql return 1;\n", encoding="utf-8"
    )
    return place


def add_migration(folder: Path, text: str) -> None:
    """Add a migration to the schema in a folder."""
    (folder / "migrations" / f"{newest_version(folder) + 1:04}_extra.sql").write_text(text, encoding="utf-8")


def meta(database: Database) -> tuple[int, int] | None:
    """Return version and oldest relay of the schema, or None without a schema."""
    with database.connect() as conn:
        if conn.execute("select to_regnamespace('outbox')::text").fetchone() == (None,):
            return None
        return conn.execute("select schema_version, min_relay from outbox.meta").fetchone()  # type: ignore[return-value]
