"""Statements that the server really ends, by its `statement_timeout`: each gets smaller until it is done in time.

The limit is the relay's own, only shorter, and the server takes long for each event or row, so that a statement of many
never ends in time and one of few always does. Only a session behind a pooler meets a limit of the role or database.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.database import Database, query
from tests.support.deliveries import add_waiting, dead_letters, delivered, emit, ids, in_order
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.short_statements import short_statements

pytestmark = pytest.mark.slow

LIMIT_MS = 1000
"""Long enough for every statement but those that a test makes slow."""
EVENTS = 1100
SLOW_READS = """
create or replace function outbox_internal.delivery_fault(
    payload bytea, key text, headers jsonb, deliver_at timestamptz, ceiling bigint
) returns text language plpgsql stable as $$
begin
    perform pg_sleep({seconds});
    return case when octet_length(payload) > ceiling then
        'payload has ' || octet_length(payload)::text || ' bytes, more than the ceiling of ' || ceiling::text end;
end $$
"""
"""The function that the reading functions call for each event that they return."""
SLOW_ROWS = """
create function public.slow() returns trigger language plpgsql as $$
begin
    perform pg_sleep({seconds});
    return coalesce(new, old);
end $$;
create trigger slow before {change} on outbox.delivery for each row execute function public.slow()
"""


@pytest.fixture(autouse=True)
def limit() -> Generator[None]:
    """Shorten the relay's own limit of a statement."""
    with short_statements(LIMIT_MS):
        yield


def make(database: Database, statements: str) -> None:
    """Change the database, as its owner."""
    with database.connect(autocommit=True) as connection:
        connection.execute(statements.encode())


def all_arrive(harness: RelayHarness, sink: MemorySink, wanted: list[int], *statements: str) -> None:
    """Wait until all is delivered, once and in order; statements of each of these names were ended by the server."""
    delivered(sink, wanted, seconds=60)
    harness.settled(seconds=60)
    assert sorted(ids(sink)) == wanted
    assert in_order(sink.delivered)
    assert all(harness.store.timed_out[statement] >= 1 for statement in statements)
    assert harness.ended == []


def test_reads_of_the_log_that_run_out_of_time_get_smaller(database: Database) -> None:
    make(database, SLOW_READS.format(seconds=0.001))
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        all_arrive(harness, sink, emit(database, [f"k{n % 7}" for n in range(EVENTS)]), "read_small", "read_rest")
        assert harness.store.timed_out.keys() == {"read_small", "read_rest"}


def test_a_large_payload_that_is_never_read_in_time_is_dead_and_its_neighbours_flow(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.relay.log_reader.AGAIN_SECONDS", 0.1)
    slow_payload = SLOW_READS.format(
        seconds="case when octet_length(payload) between 65537 and ceiling then 5 else 0 end"
    )
    make(database, slow_payload)
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        with database.connect() as connection:
            each = "select outbox.emit_raw('t', %s, key => 'k')"
            for n in range(40):
                connection.execute(each, (b"x" * (100_000 if n == 20 else 1),))
        every = [event for (event,) in query(database, "select id from outbox.event order by id")]
        delivered(sink, every[:20] + every[21:], seconds=90)
        harness.settled()
        assert harness.ended == []
        assert harness.store.timed_out["read_rest"] >= 9
    reason = "reading it failed, it ran out of time: payload has 100000 bytes"
    assert dead_letters(database) == [(every[20], reason, 0)]
    assert ids(sink) == every[:20] + every[21:]


@BOTH
def test_claims_that_run_out_of_time_get_smaller(database: Database, keeps_order: bool) -> None:
    make(database, SLOW_ROWS.format(change="update of claims", seconds=0.05))
    sink = MemorySink(keeps_order=keeps_order)
    for event in range(1, 41):
        add_waiting(database, event, f"k{event}")
    with running(database.dsn, (spec("s"), sink)) as harness:
        all_arrive(harness, sink, list(range(1, 41)), "claim_rows")
        assert harness.store.timed_out.keys() == {"claim_rows"}
