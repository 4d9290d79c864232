"""Archives that were given up or superseded: named in the database until their objects are removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.errors import ArchiveFailed
from outbox_relay.postgres.store import Store
from outbox_relay.retention import archiver
from tests.support.archives import odd_events, run, write_config
from tests.support.database import Database
from tests.support.days import Connection, date_ago

NAMES = "select array_remove(array[archived_to, writing_to] || unfinished, null) from outbox.day where day = %s"


def refuse(*_: Any) -> None:
    """Fail as a parent process does that gives an archive up after it was written."""
    raise ArchiveFailed("here", "given up")


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Path:
    """Return a file with an archive in a directory."""
    return write_config(database, tmp_path, str(tmp_path / "archive"))


def folders(config: Path) -> set[str]:
    """Return the addresses of the archives in the directory."""
    return {str(folder) for folder in (config.parent / "archive").iterdir()}


def named(owner: Connection) -> set[str]:
    """Return the addresses of archives that the database knows."""
    return {name for (names,) in owner.execute(NAMES, (date_ago(12),)).fetchall() for name in names}


def no_removal(*_: Any) -> list[str]:
    """Remove nothing, as a bucket that forbids it does."""
    return []


@pytest.mark.slow
def test_archives_that_cannot_be_removed_stay_named_until_they_are(
    owner: Connection, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when the name of one is overwritten by that of the next."""
    odd_events(owner)
    with monkeypatch.context() as broken:
        broken.setattr(archiver.Archiver, "_remove", no_removal)
        broken.setattr(Store, "record_archive", refuse)
        for attempt in range(1, 4):
            assert run(config).code == 1
            assert len(folders(config)) == attempt
            assert named(owner) == folders(config)
    assert run(config).json["emptied"] == [date_ago(12)]
    assert len(folders(config)) == 1
    assert named(owner) == folders(config)
