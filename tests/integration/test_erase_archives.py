"""Erasures and archives: those that hold an erased event are named, and written again while their day is in the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import errors

from outbox_relay.postgres.store import Store
from tests.support.archives import archived, run, write_config
from tests.support.command import inside
from tests.support.database import Database
from tests.support.days import Connection, begin, emit_ago, fill_days, keep, one
from tests.support.erasing import Erasure

LEFT = "select archived_to, writing_to, unfinished, checked_snapshot, archived_snapshot from outbox.day"


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner to a database with a past day, which is to be archived."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 12, 3)
        emit_ago(connection, 0)
        keep(connection, 5, archive=True)
        yield connection


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Path:
    """Return a file with an archive in a directory."""
    return write_config(database, tmp_path, str(tmp_path / "archive"))


def erased(config: Path, key: str) -> Any:
    """Erase a key, and return what is said in JSON."""
    ended = inside("erase", "--key", key, "--reason", "asked for", "--yes", "--json", "-c", config)
    assert ended.code == 0, ended
    return ended.json


@pytest.mark.fence("a day is emptied whose archive holds an event as it was before its erasure")
@pytest.mark.slow
def test_an_archive_of_a_day_that_is_still_there_is_written_again(
    owner: Connection, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when an erasure leaves the archive of its day as it is."""

    def locked(*_: object) -> str:
        return "locked"

    with monkeypatch.context() as patch:
        patch.setattr(Store, "empty_day", locked)
        assert run(config).json["done"] == 0
    old = one(owner, "select archived_to from outbox.day")
    assert b"k2" in b"".join(str(event).encode() for event in archived(old))
    assert erased(config, "k2") == {"done": 1, "left": 0, "archives": [{"address": old, "holds": True}]}
    assert owner.execute(LEFT).fetchall()[0][:3] == (None, None, [old])
    assert erased(config, "k2")["archives"] == [{"address": old, "holds": True}]
    assert run(config).json["done"] == 1
    [(new, unfinished)] = owner.execute("select archived_to, unfinished from outbox.day where emptied_at is not null")
    assert unfinished == []
    assert not Path(old).exists()
    assert {event.key for event in archived(new)} == {"k1", None, "k3"}
    assert erased(config, "k2")["archives"] == []


@pytest.mark.fence("a day is emptied whose archive holds an event as it was before its erasure")
def test_an_archive_that_is_being_written_does_not_count(owner: Connection, database: Database) -> None:
    lease = begin(owner)
    owner.execute("select outbox_internal.check_day(current_date - 12, %s)", (lease,))
    owner.execute("select outbox_internal.begin_archive(current_date - 12, %s, '/a/half')", (lease,))
    assert Erasure(database, {"key": "k2"}).run()["archives"] == ["/a/half"]
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="has no check"):
        owner.execute("select outbox_internal.record_archive(current_date - 12, %s, '/a/half', 'x', 3)", (lease,))
    assert one(owner, f"select outbox_internal.empty_day(current_date - 12, {lease}, 3)") == "again"
