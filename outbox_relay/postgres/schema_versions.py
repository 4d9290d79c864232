"""The versions of the schema, and which relays work on them.

The files of ``schema/`` define the newest version: ``tables/`` with every table, ``functions/``, ``views.sql`` and
``triggers.sql``. ``schema/migrations/`` holds what brings the tables and data of an existing database there, one file
``NNNN_name.sql`` per version after ``BASELINE``. Its first lines may contain ``-- min_relay: N``: relays made for a
schema older than N do not work on it. Without this line, every relay works on it that works on the version before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_relay.domain.errors import DatabaseUnusable

BASELINE: Final = 34
"""The first version. Databases with an older one were made before the first release, and are refused."""

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_MIN_RELAY = re.compile(r"^-- min_relay: (\d+)$", re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "schema"
SCHEMA_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "schema"
"""Inside the package if it was installed from a wheel, next to it in a checkout."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its version, name and SQL, and the oldest schema whose relays still work."""

    version: int
    name: str
    min_relay: int
    text: str


def migrations(folder: Path) -> tuple[Migration, ...]:
    """Return the migrations of a schema folder, in order. Raise ``DatabaseUnusable`` if one is missing."""
    found: list[Migration] = []
    for path in _files(folder):
        text = path.read_text(encoding="utf-8")
        declared = _MIN_RELAY.search(text)
        min_relay = int(declared[1]) if declared else found[-1].min_relay if found else BASELINE
        found.append(Migration(_version(path), path.stem, min_relay, text))
    return tuple(found)


def _files(folder: Path) -> list[Path]:
    if not (folder / "tables").is_dir():
        raise DatabaseUnusable(f"{folder} does not hold the schema: install outbox-relay again")
    files = sorted(path for path in (folder / "migrations").glob("*.sql") if _FILE.fullmatch(path.name))
    if [_version(path) for path in files] != list(range(BASELINE + 1, BASELINE + 1 + len(files))):
        raise DatabaseUnusable(
            f"{folder} does not have every migration from {BASELINE + 1:04} on: install outbox-relay again"
        )
    return files


def _version(file: Path) -> int:
    return int(file.name[:4])


def newest_version(folder: Path) -> int:
    """Return the version that a schema folder defines."""
    return BASELINE + len(_files(folder))


SCHEMA_VERSION: Final = newest_version(SCHEMA_FOLDER)
"""The newest schema version in this package, for which its relay is made."""


def fit(schema_version: int | None, min_relay: int | None, *, ours: int = SCHEMA_VERSION) -> str | None:
    """Return why a relay made for schema ``ours`` cannot work on this one (None: no schema); None if it can."""
    if not schema_version:
        return "schema outbox is missing: run outbox-relay migrate"
    if schema_version < ours:
        return f"schema outbox has version {schema_version} and this relay needs {ours}: run outbox-relay migrate"
    if min_relay is not None and min_relay > ours:
        return (
            f"schema outbox has version {schema_version}, which needs relays made for version {min_relay} or newer; "
            f"this one is made for {ours}: install a newer outbox-relay"
        )
    return None
