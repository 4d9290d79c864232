"""The retention of a relay: with the grants of its role alone, one relay at a time, and what it logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog
from structlog.testing import capture_logs

from outbox_relay.domain.errors import ArchiveFailed, StatementFailed
from outbox_relay.postgres.retention_statements import DayCheck
from outbox_relay.postgres.store import Store
from outbox_relay.relay.retention import Retention
from outbox_relay.retention.archiver import ProcessArchiver, archiver_for
from outbox_relay.settings.retention import RetentionSettings
from tests.support.command import inside
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
from tests.support.wait import auntil

SECONDS = 30


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode, to a database with two days past keep_days."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 11)
        emit_ago(connection, 0)
        keep(connection, 5)
        yield connection


@asynccontextmanager
async def passes(dsn: str, settings: RetentionSettings | None, *, alive: bool = True) -> AsyncGenerator[UUID]:
    """Let one relay do its passes during the block."""
    store = Store(lambda: dsn, pooler=False, connections=4)
    await store.open()
    relay = uuid4()
    if alive:
        await store.heartbeat(relay, "r", "1", [], 5)
    stated = settings and settings.stated()
    archiver = settings and archiver_for(settings.archive, settings.archive_format, lambda: dsn, pooler=False)
    log = structlog.stdlib.get_logger("test")
    enabled = settings is None or settings.enabled
    passing = Retention(store, relay, "r", stated, archiver, log, enabled=enabled, pass_seconds=0.05)
    task = asyncio.create_task(passing.run())
    try:
        yield relay
    finally:
        task.cancel()
        await asyncio.wait({task})
        await store.close()


async def gone(owner: Connection, *days: int) -> None:
    """Wait until these days are emptied."""

    async def fact() -> bool:
        found = owner.execute("select day::text from outbox.day where emptied_at is not null").fetchall()
        return {day for (day,) in found} >= {date_ago(n) for n in days}

    await auntil(fact, seconds=SECONDS, what=f"the days {days} ago are emptied")


async def test_a_relay_archives_and_empties_with_its_grants_alone(
    database: Database, owner: Connection, relay: str, tmp_path: Path
) -> None:
    settings = RetentionSettings(keep_days=5, archive=str(tmp_path / "archive"))
    with capture_logs() as logs:
        async with passes(database.dsn_as(relay), settings):
            await auntil(
                lambda: asyncio.sleep(0, sum("archived" in line for line in logs) == 2),
                seconds=SECONDS,
                what="two days are emptied, and the log says so",
            )
    said = [(line["event"], line["day"], line["events"], line["archived"]) for line in logs if "archived" in line]
    assert said == [("retention.emptied", date_ago(n), 3, True) for n in (12, 11)]
    assert not [line for line in logs if line["log_level"] == "warning"]
    [(actor, role)] = owner.execute("select distinct actor, role_name from outbox.audit").fetchall()
    assert (actor, role) == ("relay r", relay)


async def test_what_keeps_a_day_is_logged_once(database: Database, owner: Connection, relay: str) -> None:
    register(owner, "crm", "beginning")
    with capture_logs() as logs:

        def blocked() -> list[Any]:
            return [line["day"] for line in logs if line["event"] == "retention.blocked"]

        async with passes(database.dsn_as(relay), RetentionSettings(keep_days=5)):

            async def passed() -> bool:
                return owner.execute("select epoch > 12 from outbox.retention").fetchone() == (True,)

            await auntil(passed, seconds=SECONDS, what="a dozen passes")
            assert blocked() == [date_ago(12), date_ago(11)]
            owner.execute("select outbox.drop_sink('crm', true, 1000, null, null)")
            await gone(owner, 12, 11)
        assert blocked() == [date_ago(12), date_ago(11)]


@pytest.mark.slow
async def test_an_archive_that_fails_for_the_same_cause_is_logged_once_a_day(
    database: Database, owner: Connection, relay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when lines are compared with the address, which is another one at each attempt."""

    async def refuse(_: ProcessArchiver, _task: object, address: str) -> dict[str, Any]:
        raise ArchiveFailed(address, "No space left on device")

    monkeypatch.setattr(ProcessArchiver, "_run", refuse)
    settings = RetentionSettings(keep_days=5, archive=str(tmp_path / "archive"))
    left = "select count(distinct left_at) from outbox.day where left_because like '%%was not written%%'"
    with capture_logs() as logs:
        async with passes(database.dsn_as(relay), settings):
            seen = set[Any]()

            async def tried() -> bool:
                seen.update(owner.execute("select left_at from outbox.day where left_at is not null").fetchall())
                return len(seen) >= 4

            await auntil(tried, seconds=SECONDS, what="two passes that archive two days")
    assert one(owner, left) == 2
    failed = [line for line in logs if line["event"] == "retention.archive_failed"]
    assert [line["day"] for line in failed] == [date_ago(12), date_ago(11)]
    assert str(tmp_path) in failed[0]["reason"]


def left(logs: list[Any]) -> list[tuple[str, str]]:
    """Return the days that were left, with the reason, as the log has them."""
    return [(line["day"], line["reason"]) for line in logs if line["event"] == "retention.left"]


async def test_a_session_that_reads_a_day_is_named_in_the_log_in_status_and_by_doctor(
    database: Database, owner: Connection, relay: str
) -> None:
    """Goes red when a day whose lock is never granted has no line, or the line does not say who has the lock."""
    with capture_logs() as logs, database.connect() as reader:
        reader.execute("select count(*) from outbox.event")
        holder = f"transaction process {reader.info.backend_pid}, role "
        async with passes(database.dsn_as(relay), RetentionSettings(keep_days=5)):

            async def passed() -> bool:
                return owner.execute("select epoch > 4 from outbox.retention").fetchone() == (True,)

            await auntil(passed, seconds=SECONDS, what="more passes than those that find the reason to last")
            said = [
                (await asyncio.to_thread(inside, *command.split(), "--dsn", database.dsn)).out
                for command in ("status", "retention status", "doctor")
            ]
            reader.rollback()
            await gone(owner, 12, 11)
    assert [day for day, _ in left(logs)] == [date_ago(12), date_ago(11)]
    assert holder in left(logs)[0][1]
    assert all(holder in out for out in said), "\n".join(said)


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(("slow", "lines"), [(1, 0), (100, 1)], ids=["once", "always"])
async def test_a_day_whose_check_always_takes_too_long_has_a_line(
    database: Database, relay: str, monkeypatch: pytest.MonkeyPatch, slow: int, lines: int
) -> None:
    inner, calls = Store.check_day, 0

    async def late(self: Store, day: str, lease: int | None) -> DayCheck:
        nonlocal calls
        if day == date_ago(12) and (calls := calls + 1) <= slow:
            raise StatementFailed("canceling statement due to statement timeout", "57014")
        return await inner(self, day, lease)

    monkeypatch.setattr(Store, "check_day", late)
    with capture_logs() as logs:
        async with passes(database.dsn_as(relay), RetentionSettings(keep_days=5)):
            await auntil(lambda: asyncio.sleep(0, calls >= (5 if lines else 2)), seconds=SECONDS, what="some checks")
    assert left(logs) == [(date_ago(12), "canceling statement due to statement timeout")] * lines


async def test_a_day_that_no_archive_is_configured_for_has_a_line(
    database: Database, owner: Connection, relay: str
) -> None:
    keep(owner, 5, archive=True)
    with capture_logs() as logs:
        async with passes(database.dsn_as(relay), None):
            await auntil(lambda: asyncio.sleep(0, len(left(logs)) == 2), seconds=SECONDS, what="a line for each day")
    assert left(logs) == [
        (date_ago(n), "it must be archived first, and no archive is configured here") for n in (12, 11)
    ]


async def test_a_relay_without_passes_says_once_that_no_relay_empties_days(
    database: Database, owner: Connection, relay: str
) -> None:
    with capture_logs() as logs:
        async with passes(database.dsn_as(relay), RetentionSettings(enabled=False, keep_days=5)):

            async def passed() -> bool:
                return owner.execute("select epoch > 6 from outbox.retention").fetchone() == (True,)

            async def says_so() -> bool:  # not while a pass is under way
                said = (await asyncio.to_thread(inside, "status", "--dsn", database.dsn)).out
                return "no relay empties days, no pass yet: set [retention] enabled = true, or run" in said

            await auntil(passed, seconds=SECONDS, what="some passes")
            await auntil(says_so, seconds=SECONDS, what="status says so")
    assert [(line["event"], line["days"]) for line in logs] == [("retention.idle", 2)]


@pytest.mark.parametrize("as_relay", [False, True], ids=["owner", "the relay's role"])
async def test_a_relay_that_does_no_passes_leaves_them_to_the_command(
    database: Database, owner: Connection, relay: str, *, as_relay: bool
) -> None:
    async def passed() -> bool:
        return owner.execute("select epoch > 12 and keep_days = 5 from outbox.retention").fetchone() == (True,)

    async with passes(database.dsn_as(relay), RetentionSettings(enabled=False, keep_days=5)):
        await auntil(passed, seconds=SECONDS, what="a dozen passes")
        assert [events_of(owner, table_ago(n)) for n in (12, 11)] == [3, 3]
        last = one(owner, "select outbox.retention_status() ->> 'last_pass'")
        ended = await asyncio.to_thread(retention, database, "run", user=relay if as_relay else None)
        assert (ended.code, ended.err) == (0, "")
        await gone(owner, 12, 11)
    assert last is None, "a pass without steps is none"
    assert one(owner, "select outbox.retention_status() ->> 'last_pass'") is not None


async def test_two_relays_empty_each_day_once(database: Database, owner: Connection, relay: str) -> None:
    settings = RetentionSettings(keep_days=5)
    async with passes(database.dsn_as(relay), settings), passes(database.dsn_as(relay), settings):
        await gone(owner, 12, 11)
    assert owner.execute("select count(*), sum(events) from outbox.day").fetchall() == [(2, 6)]
    assert owner.execute("select count(*) from outbox.audit where action = 'retention'").fetchone() == (2,)


async def test_a_relay_that_is_not_alive_yet_does_no_pass(database: Database, owner: Connection, relay: str) -> None:

    async def passed() -> bool:
        return owner.execute("select epoch > 3 from outbox.retention").fetchone() == (True,)

    dsn = database.dsn_as(relay)
    short, all_time = RetentionSettings(keep_days=5), RetentionSettings(keep_days=0)
    async with passes(dsn, short, alive=False), passes(dsn, all_time):
        await auntil(passed, seconds=SECONDS, what="passes of the other relay")
    assert owner.execute("select keep_days from outbox.retention").fetchone() == (0,)
    assert events_of(owner, table_ago(12)) == 3
