"""The file with the connection string, missing for a moment as while a secret is replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, DatabaseUnusable
from outbox_relay.postgres.database import Database
from outbox_relay.settings import load

NOWHERE = "host=127.0.0.1 port=1 dbname=shop"
MISSING: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_text(""),
    "half written": lambda file: file.write_text("host='127."),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "dsn"
    path.write_text(NOWHERE)
    return path


def database_of(file: Path) -> Database:
    dsn = load(None, {"OUTBOX_RELAY_DATABASE__DSN_FILE": str(file)}).database.dsn
    return Database(dsn, pooler=False, connections=1)


@pytest.mark.parametrize("fault", MISSING)
def test_a_relay_that_waits_for_its_database_waits_for_the_file_too(file: Path, fault: str) -> None:
    database = database_of(file)
    with pytest.raises(DatabaseUnavailable, match="127"):
        database.open()
    MISSING[fault](file)
    with pytest.raises(DatabaseUnavailable, match=r"dsn_file|not a connection string"):
        database.open()


@pytest.mark.parametrize("fault", MISSING)
def test_a_file_that_is_unusable_from_the_start_is_a_wrong_setting(file: Path, fault: str) -> None:
    database = database_of(file)
    MISSING[fault](file)
    with pytest.raises((ConfigurationError, DatabaseUnusable), match=r"dsn_file|not a connection string"):
        database.open()
