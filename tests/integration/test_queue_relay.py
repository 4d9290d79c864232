"""Relays of a sink with ``claim = "rows"``: rows shared, bounded, repeated after a crash, and settled as any others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from outbox_relay.relay import queue_reader
from outbox_relay.relay.sink_spec import SinkSpec
from tests.support.database import Database, end_connections, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.memory_sink import BOTH, Gate, MemorySink
from tests.support.relay_harness import LOST, owns, running, spec
from tests.support.wait import until

ROWS = "select count(*) from outbox.delivery"


def queued(**changes: Any) -> SinkSpec:
    """Return the sink ``s`` with ``claim = "rows"``."""
    return spec("s", claim="rows", order="none", **changes)


def got(sinks: Collection[MemorySink], wanted: Collection[int]) -> None:
    """Wait until all events have been delivered by one sink or another."""

    def fact() -> bool:
        return not set(wanted) - {event.id for sink in sinks for event in sink.delivered}

    until(fact, seconds=20, what="every event is delivered")


@BOTH
def test_every_event_is_delivered_once_as_a_row(database: Database, keeps_order: bool) -> None:
    sink = MemorySink(keeps_order=keeps_order)
    with running(database.dsn, (queued(), sink)) as relay:
        relay.owns_all()
        wanted = emit(database, ["a", None, "b"] * 100)
        delivered(sink, wanted)
        relay.settled()
        assert Counter(ids(sink)) == Counter(wanted)
        [late] = emit(database, ["c"])  # a relay that is idle asks for the window together with the tick
        delivered(sink, [late])
        relay.settled()
        assert relay.store.calls["read_small"] == relay.store.calls["read_rest"] == relay.store.calls["read_late"] == 0
    assert query(database, ROWS) == [(0,)]


def test_two_relays_share_the_rows_of_one_shard_and_deliver_each_once(database: Database) -> None:
    async def slow(_event: StoredEvent, _attempt: int) -> Verdict:
        await asyncio.sleep(0.005)
        return DELIVERED

    sinks = [MemorySink(slow, keeps_order=False, max_in_flight=4) for _ in range(2)]
    with running(database.dsn, (queued(), sinks[0])) as first, running(database.dsn, (queued(), sinks[1])):
        owns(first, 32)
        wanted = emit(database, ["one key"] * 500)
        got(sinks, wanted)
    assert Counter(ids(sinks[0]) + ids(sinks[1])) == Counter(wanted)
    assert all(sink.delivered for sink in sinks)


def test_rows_of_a_relay_that_crashed_are_delivered_when_their_leases_lapse(database: Database) -> None:
    async def never(_event: StoredEvent, _attempt: int) -> Verdict:
        await Gate().wait()
        return DELIVERED

    stuck, sink = MemorySink(never, keeps_order=False), MemorySink(keeps_order=False)
    with running(database.dsn, (queued(), stuck), lease_seconds=3.0) as crashing:
        crashing.owns_all()
        wanted = emit(database, [None] * 10)
        has(database, "select from outbox.delivery where lease is not null having count(*) = 10")
        crashing.crash()
    with running(database.dsn, (queued(), sink), lease_seconds=3.0) as relay:
        relay.owns_all()
        more = emit(database, [None])
        delivered(sink, more)
        assert ids(sink) == more
        has(database, "select from outbox.delivery having count(*) = 10")  # its lease is not ended: it is settled
        query(database, "update outbox.delivery set lease_until = now() where lease is not null returning 1")
        got([sink], wanted)
        relay.settled()
    assert Counter(ids(sink)) == Counter(wanted + more)


@pytest.mark.fence("sessions that end leave rows with leases, and their claims count until the rows are dead")
def test_rows_in_hand_are_given_back_when_a_session_ends(database: Database) -> None:
    """No lease has to lapse, and no claim is counted, however often sessions end."""
    waiting = Gate()

    async def waits(_event: StoredEvent, _attempt: int) -> Verdict:
        await waiting.wait()
        return DELIVERED

    sink = MemorySink(waits, keeps_order=False)
    with running(database.dsn, (queued(), sink), expects=LOST) as relay:
        relay.owns_all()
        wanted = emit(database, [None] * 5)
        for _ in range(3):
            [(lease,)] = has(database, "select min(lease::text) from outbox.delivery having count(lease) = 5")
            end_connections(database)
            has(database, "select from outbox.delivery where lease::text <> %s having count(*) = 5", lease, seconds=30)
        assert query(database, "select max(claims) from outbox.delivery") == [(1,)]
        waiting.set()
        got([sink], wanted)


def test_no_more_rows_are_made_than_pending_max_and_then_all_come(database: Database) -> None:
    free = Gate()

    async def waits(_event: StoredEvent, _attempt: int) -> Verdict:
        await free.wait()
        return DELIVERED

    sink = MemorySink(waits, keeps_order=False)
    with running(database.dsn, (queued(pending_max=50), sink)) as relay:
        relay.owns_all()
        first = emit(database, [None] * 60)
        has(database, "select from outbox.sink where last_error like '50 events wait as rows%%(pending_max)%%'")
        later = emit(database, [None] * 60)
        assert query(database, ROWS) == [(60,)]  # a window is not cut
        free.set()
        got([sink], first + later)
        relay.settled()
        has(database, "select from outbox.sink where last_error is null or last_error_mended_at >= last_error_at")


REFUSE = """
create function public.refuse() returns trigger language plpgsql as $$
begin
    if new.type = 'bad' and new.state <> 'dead' then
        raise exception 'not this one' using errcode = '{}';
    end if;
    return new;
end
$$;
create trigger refuse before insert on outbox.delivery for each row execute function public.refuse()
"""


def refuse(database: Database, code: str) -> None:
    """Let rows of the type `bad` be refused with an SQLSTATE."""
    with database.connect() as connection:
        connection.execute(REFUSE.format(code).encode())


@pytest.mark.parametrize("code", ["53100", "54000"])
def test_rows_under_way_outlast_a_window_that_cannot_become_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(queue_reader, "AGAIN_SECONDS", 0.02)
    free = Gate()

    async def waits(_event: StoredEvent, _attempt: int) -> Verdict:
        await free.wait()
        return DELIVERED

    sink = MemorySink(waits, keeps_order=False)
    with running(database.dsn, (queued(), sink)) as relay:
        relay.owns_all()
        [first] = emit(database, [None])
        has(database, "select from outbox.delivery where lease is not null")
        refuse(database, code)
        with database.connect() as connection:
            outbox.emit(connection, "bad", {})
        has(database, "select from outbox.sink where last_error like 'events do not become rows%%not this one%%'")
        free.set()
        got([sink], [first])
        with database.connect() as connection:
            connection.execute("drop trigger refuse on outbox.delivery")
        got([sink], [first, first + 1])
    assert not relay.loops[0].restarts
