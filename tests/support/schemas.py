"""Folders of migrations, and the version of a schema."""

import shutil
from pathlib import Path

from outbox_relay.postgres.schema_versions import SCHEMA_FOLDER, migrations
from tests.support.database import Database


def schema_up_to(version: int, place: Path) -> Path:
    """Copy the schema into `place` without the migrations after `version`, and return `place`."""
    shutil.copytree(SCHEMA_FOLDER, place)
    for path in place.glob("[0-9]*.sql"):
        if int(path.name[:4]) > version:
            path.unlink()
    return place


def add_migration(folder: Path, text: str) -> None:
    """Add a migration to a folder."""
    (folder / f"{len(migrations(folder)) + 1:04}_extra.sql").write_text(text, encoding="utf-8")


def meta(database: Database) -> tuple[int, int] | None:
    """Return version and oldest relay of the schema, or None without a schema."""
    with database.connect() as conn:
        if conn.execute("select to_regnamespace('outbox')::text").fetchone() == (None,):
            return None
        return conn.execute("select schema_version, min_relay from outbox.meta").fetchone()  # type: ignore[return-value]
