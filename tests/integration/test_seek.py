"""Sinks that are put at another place of the log, while relays run and while transactions are open."""

from __future__ import annotations

import pytest

from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.window import Position
from outbox_relay.postgres.migrations import rebase
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, ids, in_order
from tests.support.ledger import ledger
from tests.support.lock_waits import SECONDS, begun
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.sink_actions import audited, call, register, seek
from tests.support.wait import until

SHORT_LEASE = 3.0
KEYS = [f"k{n % 7}" for n in range(40)]
BACKLOG = "select events from outbox_internal.backlog('s', null, 1000, 5.0)"
FOREIGN = "update outbox.event set xid = (xid::text::bigint + 1000000)::text::xid8"
"""Transaction numbers of another cluster, which this one has not given out."""
SEEK = "select from outbox.seek_sink('s', %s, 'tester', null)"
AGE = "update outbox.event set created_at = created_at - interval '1 hour'"


def again(sink: MemorySink, before: int) -> list[int]:
    """Return the ids of the deliveries after the first `before`."""
    return ids(sink)[before:]


def test_seek_to_the_beginning_delivers_everything_again_in_order_under_load(database: Database) -> None:
    sink = MemorySink(keeps_order=False)
    with running(
        database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"reload", "lease_lost"}
    ) as harness:
        wanted = emit(database, KEYS)
        delivered(sink, wanted)
        harness.settled()
        before = len(sink.delivered)
        seek(database, "s", "beginning")
        wanted += emit(database, KEYS)
        delivered(sink, wanted)
        harness.settled()
    assert set(again(sink, before)) == set(wanted)
    assert in_order(sink.delivered[before:])


def test_seek_to_now_passes_over_the_backlog_and_loses_nothing_emitted_after(database: Database) -> None:
    sink = MemorySink()
    with running(
        database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"reload", "lease_lost"}
    ) as harness:
        harness.owns_all()
        call(database, "update outbox.sink set paused = true")
        released(harness)
        skipped = emit(database, KEYS)
        found = seek(database, "s", "now")
        assert found == {"again": 0, "passed_over": len(skipped), "exact": True}
        wanted = emit(database, KEYS)
        call(database, "update outbox.sink set paused = false")
        delivered(sink, wanted)
        harness.settled()
    assert ids(sink) == wanted
    assert audited(database) == [("sinks seek", "s", {"to": "now"}, len(skipped), "tester")]


def released(harness: RelayHarness) -> None:
    """Wait until the relay owns no shard."""

    def fact() -> bool:
        return not harness.keeper.held["s"]

    until(fact, seconds=20, what="every shard is released")


@pytest.mark.fence("an event with a lower id is committed while a seek looks for its place")
def test_an_event_with_a_lower_id_that_is_committed_meanwhile_is_delivered(database: Database) -> None:
    """Goes red when the tick is taken after the lowest id was looked up, or is not used."""
    register(database, "s")
    sink = MemorySink()
    with database.connect() as long, database.connect() as longer, database.connect() as holder:
        low, lowest = (
            connection.execute("select outbox.emit_raw('t', '1', key => 'late') is not null").fetchone()
            and connection.execute("select currval('outbox.event_id_seq')").fetchone()
            for connection in (long, longer)
        )
        [(at,)] = query(database, "select clock_timestamp()::text")
        wanted = emit(database, KEYS)
        holder.execute("lock table outbox.sink in share row exclusive mode")
        with begun(database, lambda one: one.execute(SEEK, (at,)).fetchall()) as sought:
            long.commit()
            holder.commit()
            sought.result(SECONDS)
        longer.commit()
    assert low
    assert lowest
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, [*wanted, low[0], lowest[0]])
        harness.settled()
    assert sorted(ids(sink)) == sorted([*wanted, low[0], lowest[0]])


@pytest.mark.fence("a relay that has not noticed a seek writes or claims at its old place")
def test_a_relay_that_has_not_noticed_cannot_undo_a_seek(database: Database) -> None:
    """Goes red when the generation stays: a claim then gives the old session epochs above those of the seek."""
    with ledger(database) as old:
        old.register(("s", ["*"], "beginning"))
        old.own("s")
        old.lapse()
        events = old.emit(*(f"k{n}" for n in range(20)))
        end = Position(old.tick())
        old.place("s", end)
        seek(database, "s", "beginning")
        assert old.own("s") == []
        old.place("s", end)
        with pytest.raises(LeaseLost):
            old.park("s", old.row(events[0]))
        assert query(database, BACKLOG) == [(20,)]
        assert query(database, "select count(distinct owner) from outbox.shard") == [(1,)], "leases stay"


@pytest.mark.parametrize("to", ["beginning", "PT30M"])
def test_below_the_floor_of_a_rebase_the_log_is_read_in_the_old_numbering(database: Database, to: str) -> None:
    register(database, "s")
    older = emit(database, ["a", "b"])
    call(database, AGE)
    old = emit(database, ["c", "d"])
    call(database, FOREIGN)
    rebase(database.dsn)
    new = emit(database, ["e"])
    seek(database, "s", "now")
    assert query(database, BACKLOG) == [(0,)]
    seek(database, "s", to)
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, [*old, *new])
        harness.settled()
    assert sorted(ids(sink)) == [*(older if to == "beginning" else []), *old, *new]


def test_seek_says_first_what_it_does_and_asks(database: Database) -> None:
    register(database, "s")
    emit(database, ["a", "b"])
    ended = inside("sinks", "seek", "s", "--to", "now", "--dsn", database.dsn)
    assert (ended.code, ended.out) == (2, "")
    assert "About 0 events will be delivered again, and 2 passed over." in ended.err
    assert query(database, BACKLOG) == [(2,)]
    ended = inside("sinks", "seek", "s", "--to", "now", "--yes", "--json", "--dsn", database.dsn)
    assert (ended.code, ended.json) == (0, {"done": 2, "left": 0})
    ended = inside("sinks", "seek", "s", "--to", "yesterday", "--yes", "--dsn", database.dsn)
    assert ended.code == 2
    assert "such as 90s" in ended.err
