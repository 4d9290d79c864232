"""A relay takes over a sink with when_dead = "hold" and very many dead rows, each of a key of its own."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_relay.relay import earlier_outcomes
from tests.support.database import Database
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, RelayHarness, running, spec
from tests.support.wait import until

DEAD = 20_000
FILL = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at)
select 's', g, (hashtextextended('dead-' || g, 0) & 63)::smallint, 'dead', true, now(), gen_random_uuid(), 't',
       'dead-' || g, convert_to('dead', 'UTF8'), 't', now()
  from generate_series(1, %s) g"""


def do(database: Database, statement: str, *parameters: Any) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode(), parameters)


def emit(database: Database, *keys: str) -> None:
    with database.connect() as connection:
        for key in keys:
            connection.execute("select outbox.emit('t', '1', key => %s)", (key,))


def delivered(sink: MemorySink, key: str) -> list[str]:
    """Return the payloads of a key's events, in the order of their deliveries."""
    return [event.payload.decode() for event in sink.delivered if event.key == key]


def reached(what: Any, text: str) -> None:
    def fact() -> bool:
        return what()

    until(fact, seconds=20, what=text)


def blocked(harness: RelayHarness) -> int:
    """Return the number of keys that are blocked in memory."""
    session = harness.loops[0].session
    assert session
    return len(session.in_flight.blocked)


def register(database: Database) -> None:
    """Register sink s: a sink that is registered again begins without rows."""
    store = CountingStore(database.dsn)
    store.open()
    store.register_sinks([("s", ("*",), "beginning")], (store.tick()).tick)
    store.close()


def test_keys_of_dead_rows_are_not_loaded_and_block_their_events(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_outcomes, "LOOK_SECONDS", 0.05)
    register(database)
    do(database, FILL, DEAD)
    do(database, "select setval('outbox.event_id_seq', %s)", 2 * DEAD)
    emit(database, "dead-7", "free", "dead-8", "dead-7")
    sink = MemorySink(holds=True)
    with running(database.dsn, (spec("s", hold=True), sink)) as harness:
        reached(lambda: delivered(sink, "free"), "what no dead row blocks is delivered")
        harness.owns_all()
        assert harness.store.returned["blocked_keys"] <= harness.store.calls["blocked_keys"], "the row of nulls alone"
        assert harness.store.returned["discarded"] == 0
        assert blocked(harness) == 2
        assert [event.key for event in sink.delivered] == ["free"]

        do(
            database,
            "update outbox.delivery set state = 'waiting' where sink = 's' and key = any (%s)",
            ["dead-7", "dead-9"],
        )
        emit(database, "dead-9")
        reached(lambda: len(delivered(sink, "dead-7")) == 3 and len(delivered(sink, "dead-9")) == 2, "retried")
        assert delivered(sink, "dead-7") == ["dead", "1", "1"]
        assert delivered(sink, "dead-9") == ["dead", "1"], "no key of a live row was loaded after it was retried"

        do(database, "delete from outbox.delivery where sink = 's' and key = 'dead-8' and state = 'dead'")
        reached(lambda: delivered(sink, "dead-8"), "what waited behind a discarded event is delivered")

        do(database, "delete from outbox.delivery where sink = 's' and state = 'dead'")
        emit(database, "a")
        reached(lambda: delivered(sink, "a") and not blocked(harness), "no dead row is left")
        calls = harness.store.calls["still_blocked"]
        emit(database, "b")
        reached(lambda: delivered(sink, "b"), "the next event is delivered")
        assert harness.store.calls["still_blocked"] == calls, "reads ask for keys no more"
