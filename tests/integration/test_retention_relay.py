"""The retention of a relay: with the grants of its role alone, one relay at a time, and what it logs."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from structlog.testing import capture_logs

from outbox_relay.postgres.store import Store
from outbox_relay.relay.chores import Chore
from outbox_relay.relay.retention import Retention
from outbox_relay.retention.archiver import archiver_for
from outbox_relay.settings.model import RetentionSettings
from tests.support.chores import doing
from tests.support.database import Database
from tests.support.days import (
    Connection,
    date_ago,
    emit_ago,
    events_of,
    fill_days,
    keep,
    one,
    register,
    retention,
    table_ago,
)
from tests.support.wait import until

SECONDS = 30


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode, to a database with two days past keep_days."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 11)
        emit_ago(connection, 0)
        keep(connection, 5)
        yield connection


@contextmanager
def passes(dsn: str, settings: RetentionSettings) -> Generator[None]:
    """Let one relay do its passes during the block."""
    store = Store(lambda: dsn, pooler=False, connections=4)
    store.open()
    relay, log = uuid4(), structlog.stdlib.get_logger("test")
    store.heartbeat(relay, "r", "1", [], 5)
    archiver = archiver_for(settings.archive, settings.archive_format, lambda: dsn, pooler=False)
    stated = settings.stated()
    passing = Retention(store, relay, "r", stated, archiver, log, enabled=settings.enabled, pass_seconds=0.05)
    with doing(store, [Chore("retention", passing.step, 60.0, 1.0, float, leisure=0.0, limit_seconds=10.0)]):
        yield
    store.close()


def gone(owner: Connection, *days: int) -> None:
    """Wait until these days are emptied."""

    def fact() -> bool:
        found = owner.execute("select day::text from outbox.day where emptied_at is not null").fetchall()
        return {day for (day,) in found} >= {date_ago(n) for n in days}

    until(fact, seconds=SECONDS, what=f"the days {days} ago are emptied")


def test_a_relay_archives_and_empties_with_its_grants_alone(
    database: Database, owner: Connection, relay: str, tmp_path: Path
) -> None:
    settings = RetentionSettings(keep_days=5, archive=str(tmp_path / "archive"))
    with capture_logs() as logs, passes(database.dsn_as(relay), settings):
        until(
            lambda: sum("archived" in line for line in logs) == 2,
            seconds=SECONDS,
            what="two days are emptied, and the log says so",
        )
    said = [(line["event"], line["day"], line["events"], line["archived"]) for line in logs if "archived" in line]
    assert said == [("retention.emptied", date_ago(n), 3, True) for n in (12, 11)]
    assert not [line for line in logs if line["log_level"] == "warning"]
    [(actor, role)] = owner.execute("select distinct actor, role_name from outbox.audit").fetchall()
    assert (actor, role) == ("relay r", relay)


def test_what_keeps_a_day_is_logged_once(database: Database, owner: Connection, relay: str) -> None:
    register(owner, "crm", "beginning")
    with capture_logs() as logs:

        def blocked() -> list[Any]:
            return [line["day"] for line in logs if line["event"] == "retention.blocked"]

        with passes(database.dsn_as(relay), RetentionSettings(keep_days=5)):

            def passed() -> bool:
                return owner.execute("select epoch > 12 from outbox.retention").fetchone() == (True,)

            until(passed, seconds=SECONDS, what="a dozen passes")
            assert blocked() == [date_ago(12), date_ago(11)]
            owner.execute("select outbox.drop_sink('crm', true, 1000, null, null)")
            gone(owner, 12, 11)
        assert blocked() == [date_ago(12), date_ago(11)]


def left(logs: list[Any]) -> list[tuple[str, str]]:
    """Return the days that were left, with the reason, as the log has them."""
    return [(line["day"], line["reason"]) for line in logs if line["event"] == "retention.left"]


def test_a_relay_that_does_no_passes_leaves_them_to_the_command(
    database: Database, owner: Connection, relay: str
) -> None:
    def passed() -> bool:
        return owner.execute("select epoch > 12 and keep_days = 5 from outbox.retention").fetchone() == (True,)

    with passes(database.dsn_as(relay), RetentionSettings(enabled=False, keep_days=5)):
        until(passed, seconds=SECONDS, what="a dozen passes")
        assert [events_of(owner, table_ago(n)) for n in (12, 11)] == [3, 3]
        last = one(owner, "select outbox.retention_status() ->> 'last_pass'")
        ended = retention(database, "run", user=relay)
        assert (ended.code, ended.err) == (0, "")
        gone(owner, 12, 11)
    assert last is None, "a pass without steps is none"
    assert one(owner, "select outbox.retention_status() ->> 'last_pass'") is not None
