"""docs/operations.md and the tables of docs/commands.md: every statement is run, every figure is explained."""

from __future__ import annotations

import json
import re
import threading
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.admin import pause, resume, status
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Verdict
from outbox_relay.relay import settler
from outbox_relay.service.build import CONNECTIONS, CONNECTIONS_MAX, CONNECTIONS_PER_SINK, connections_for
from tests.docs.pages import ROOT, blocks, prose, text
from tests.docs.parsing import COMMON, options, parsers
from tests.support.database import Database
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import auntil, until

SECONDS = 30
UID = "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b"
PAGE = "docs/operations.md"
STATEMENTS = [block.text for block in blocks(PAGE) if block.language == "sql"]


def statement(*words: str) -> str:
    """The only block of the page with all these words."""
    [found] = [found for found in STATEMENTS if all(word in found for word in words)]
    return found


def parts(sql: str) -> list[bytes]:
    """The statements of a block; what it says of the page's day is said of today."""
    sql = sql.replace("event_20260101", f"event_{datetime.now(UTC):%Y%m%d}")
    return [part.encode() for part in re.findall(r"(?:\$\$.*?\$\$|[^$])+?(?:;\n|\Z)", sql, re.DOTALL)]


def empty(conn: psycopg.Connection[Any]) -> None:
    """Run the block that empties today; where it is refused, roll back."""
    begin, check_and_truncate, commit = parts(statement("truncate"))
    conn.execute(begin)
    try:
        conn.execute(check_and_truncate)
    except psycopg.Error:
        conn.execute("rollback")
        raise
    conn.execute(commit)


def emit(conn: psycopg.Connection[Any], key: str = "order-1", uid: str | None = None) -> str:
    """Emit an event; its uid."""
    with conn.transaction():
        return str(outbox.emit(conn, "order.created", {}, key=key, uid=None if uid is None else UUID(uid)))


async def says(harness: RelayHarness, **wanted: object) -> None:
    """Wait until `status` says so of the sink."""

    async def fact() -> bool:
        found = (await status(harness.store))["sinks"]["crm"]
        return found | wanted == found

    await auntil(fact, seconds=SECONDS, what=f"status says {wanted}")


def uids(sink: MemorySink) -> list[str]:
    """What was delivered, in order."""
    return [event.uid for event in sink.delivered]


async def test_every_statement_of_the_page_is_run(database: Database) -> None:
    async with running(database.dsn, (spec("crm"), MemorySink())) as harness:
        await harness.owns_all()
    with database.connect(autocommit=True) as conn:
        conn.execute("""select outbox.register_sinks('[{"name": "crm", "patterns": ["*"]}]', 0, '3:3:', 3)""")
        for sql in STATEMENTS:
            for part in parts(sql):
                conn.execute(part)


async def test_dead_letters_are_listed_retried_and_given_up(database: Database) -> None:
    asked: list[str] = []

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        asked.append(event.uid)
        return Refused("no", 400) if event.uid == UID else DELIVERED

    sink = MemorySink(script, keeps_order=False)
    with database.connect() as conn:
        emit(conn, uid=UID)
        follower = emit(conn)
    async with running(database.dsn, (spec("crm", hold=True), sink)) as harness:
        with database.connect(autocommit=True) as conn:
            await says(harness, dead=1, held=1)
            [(name, uid, *_)] = conn.execute(statement("select sink, uid").encode()).fetchall()
            assert (name, str(uid), asked) == ("crm", UID, [UID])
            for times, retry in enumerate((f"uid = '{UID}'", "type = 'order.created'"), 2):
                assert conn.execute(statement("set state", retry).encode()).rowcount == 1
                await says(harness, dead=1, waiting=0)
                assert asked == [UID] * times
            assert conn.execute(statement("delete", f"uid = '{UID}'").encode()).rowcount == 1
            await says(harness, dead=0, backlog=0)
    assert (uids(sink), asked) == ([follower], [UID] * 3 + [follower])


async def test_a_day_is_emptied_once_every_sink_has_settled_it(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("crm"), sink), lease_seconds=3) as harness:
        with database.connect(autocommit=True) as conn, database.connect() as late:
            late.execute("select")
            latecomer = emit(late, "order-2")
            first = emit(conn)
            await says(harness, backlog=0)
            await pause(harness.store, "crm")
            await says(harness, unowned=64)
            late.commit()
            with pytest.raises(psycopg.errors.RaiseException, match="has not settled this day"):
                empty(conn)
            await resume(harness.store, "crm")
            await says(harness, backlog=0, unowned=0)

            await pause(harness.store, "crm")
            await says(harness, unowned=64)
            second = emit(conn)
            with pytest.raises(psycopg.errors.RaiseException, match="has not settled this day"):
                empty(conn)
            await resume(harness.store, "crm")
            await says(harness, backlog=0, unowned=0)
            assert uids(sink) == [first, latecomer, second]

            late.execute("select from outbox.event")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                empty(conn)
            late.rollback()
            assert conn.execute("select count(*) from outbox.event").fetchone() == (3,)
            empty(conn)
            for part in parts(statement("detach")):
                conn.execute(part)
            assert conn.execute("select count(*) from outbox.event").fetchone() == (0,)
            last = emit(conn)
            await says(harness, backlog=0)
            assert uids(sink)[3:] == [last]


@pytest.mark.parametrize("default", ["read committed", "repeatable read", "serializable"])
def test_a_day_is_not_emptied_of_what_was_committed_while_the_block_waited(database: Database, default: str) -> None:
    """Under another isolation level the snapshot is from before the lock; the block sets its own."""
    with database.connect(autocommit=True) as conn:
        conn.execute(f"alter database {database.name} set default_transaction_isolation = '{default}'".encode())
    register = """select outbox.register_sinks('[{"name": "s", "patterns": ["*"]}]', 0, '3:3:', 3)"""
    begin, check_and_truncate, _ = parts(statement("truncate"))
    check_and_truncate = check_and_truncate.replace(b"'50ms'", b"'20s'")
    with database.connect() as conn, database.connect() as late, database.connect(autocommit=True) as watcher:
        watcher.execute(register)
        late.execute("select outbox.emit('t', '1')")
        conn.execute("rollback")
        conn.autocommit = True
        refused: list[str] = []

        def run() -> None:
            conn.execute(begin)
            try:
                conn.execute(check_and_truncate)
            except psycopg.errors.RaiseException as error:
                refused.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        waiting = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        pid = conn.info.backend_pid
        until(lambda: watcher.execute(waiting, [pid]).fetchone(), seconds=20, what="the block waits for its lock")
        late.commit()
        thread.join(timeout=20)
        conn.execute("rollback")
        assert "has not settled this day" in refused[0]
        conn.execute("begin isolation level repeatable read")
        with pytest.raises(psycopg.errors.RaiseException, match="must run in a transaction that is read committed"):
            conn.execute(check_and_truncate)
        conn.execute("rollback")


async def test_a_sink_is_removed(database: Database) -> None:
    async with running(database.dsn, (spec("crm"), MemorySink())) as harness:
        await harness.owns_all()
    with database.connect(autocommit=True) as conn:
        for part in parts(statement("outbox.remove_sink")):
            conn.execute(part)
        for table in ("sink", "shard", "progress", "delivery"):
            assert conn.execute(f"select count(*) from outbox.{table}".encode()).fetchone() == (0,), table


# -- what the pages explain ---------------------------------------------------------------------------------------


async def test_every_figure_of_status_is_explained(database: Database) -> None:
    async with running(database.dsn, (spec("crm"), MemorySink())) as harness:
        found = await status(harness.store)
    commands = text("docs/commands.md").split("## status")[1].split("\n## ")[0]
    watched = prose(PAGE).split("## Watch")[1].split("\n## ")[0]
    for field in {*found["sinks"]["crm"], *found} - {"sinks"}:
        assert f"`{field}`" in commands, field
        assert f"`{field}`" in watched, field
    [ready] = re.findall(r'^\{"ready.*', text("docs/commands.md"), re.MULTILINE)
    for field in {*json.loads(ready), *json.loads(ready)["sinks"]["events"]} - {"ready", "sinks"}:
        assert f"`{field}`" in watched, field


def test_the_runbook_quotes_what_the_log_says() -> None:
    said = "\n".join(path.read_text() for path in (ROOT / "outbox_relay").rglob("*.py"))
    section = prose(PAGE).split("| level | event | |")[1].split("\n\n")[0]
    events = [event.removeprefix("… ") for event in re.findall(r"`([^`]+)`", section)]
    assert len(events) > 10
    for event in events:
        if "_" not in event:
            assert event in said, event


def test_the_figures_of_the_pages_are_those_of_the_code() -> None:
    base, each, most = CONNECTIONS, CONNECTIONS_PER_SINK, CONNECTIONS_MAX
    assert f"up to {base} + {each} for each sink, at most {most}" in text(PAGE)
    assert f"{connections_for(2) + 1} with two sinks" in text(PAGE)
    guarantees = " ".join(text("docs/guarantees.md").split())
    assert (
        f"while {settler.MOST_EVENTS:,} events or {settler.MOST_BYTES >> 20} MiB of payload are in flight" in guarantees
    )
    assert f"written at least every {settler.FLUSH_SECONDS} s" in guarantees


SECTIONS = re.split(r"\n## ", text("docs/commands.md"))[1:]


def test_the_page_has_a_section_for_every_command() -> None:
    assert {section.partition("\n")[0] for section in SECTIONS} == set(parsers())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_page_names_every_option(section: str) -> None:
    command = section.partition("\n")[0]
    [synopsis] = re.findall(rf"^    (outbox-relay {command}\b.*)$", section, re.MULTILINE)
    rows = re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)
    assert set(re.findall(r"--[\w-]+", synopsis)) == options(command)
    assert set(rows) == options(command)
    assert not set(rows) & COMMON


def test_the_examples_of_the_log_are_json() -> None:
    [block] = [block for block in blocks(PAGE) if block.language == "json"]
    for line in block.text.splitlines():
        assert {"event", "level", "time", "logger"} <= json.loads(line).keys()
