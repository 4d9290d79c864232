"""The schema of a possible next release, and the version of a schema."""

import re
import shutil
from pathlib import Path

from outbox_relay.postgres.schema import SCHEMA_FOLDER, newest_version
from tests.support.database import Database

EXTRA = """alter table outbox.event add column extra text;
alter table outbox.sink add column extra integer;
create table outbox.extra (id bigint primary key);
"""


CHANGED = ("outbox.emit", "outbox.emit_raw", "outbox_internal.settle")


def next_schema(place: Path) -> Path:
    """Copy the schema into `place`, with further columns, a table, a function and changed functions; return `place`.

    Each of ``CHANGED`` leaves its name in the setting outbox.extra of its transaction.
    """
    shutil.copytree(SCHEMA_FOLDER, place)
    add_migration(place, EXTRA)
    for path in (place / "functions").glob("*.sql"):
        text = path.read_text(encoding="utf-8")
        for name in CHANGED:
            text = re.sub(
                rf"(create or replace function {re.escape(name)}\(.*?\nbegin\n)",
                rf"\1    perform pg_catalog.set_config('outbox.extra', '{name}', true);\n",
                text,
                count=1,
                flags=re.DOTALL,
            )
        path.write_text(text, encoding="utf-8")
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
