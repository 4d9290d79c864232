"""Shards under more than one relay: shared, handed over, taken over; what a relay that lost one can no longer do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import Failed, RetryPolicy, Verdict
from outbox_relay.domain.routing import SinkRoutes
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.database import statements
from outbox_relay.postgres.rows import DeliveredRow, RowUpdate
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, owns, running, spec
from tests.support.wait import until

SHORT_LEASE = 3.0


def all_in_order(*sinks: MemorySink) -> bool:
    """Return True if the events of each key came in order at each sink."""
    return all(in_order(sink.delivered) for sink in sinks)


def test_two_relays_share_every_shard_once_and_no_handover_repeats_an_event(database: Database) -> None:
    one, two = MemorySink(), MemorySink()
    with running(database.dsn, (spec("s"), one), lease_seconds=SHORT_LEASE) as first:
        owns(first, SHARDS)
        wanted = emit(database, [f"k{n}" for n in range(300)])
        with running(database.dsn, (spec("s"), two), lease_seconds=SHORT_LEASE) as second:
            owns(first, SHARDS // 2)
            owns(second, SHARDS // 2)
            assert query(database, "select count(distinct owner), count(*) from outbox.shard") == [(2, SHARDS)]
            for _ in range(5):
                wanted += emit(database, [f"k{n}" for n in range(300)])
            delivered_together(wanted, one, two)
            second.stop()
            owns(first, SHARDS)
        wanted += emit(database, [f"k{n}" for n in range(300)])
        delivered_together(wanted, one, two)
    together = ids(one) + ids(two)
    assert sorted(together) == wanted, "every event once"
    assert ids(two), "the second relay delivered its part"
    assert all_in_order(one, two)


def delivered_together(wanted: list[int], *sinks: MemorySink) -> None:
    """Wait until the sinks together have been given all of `wanted`."""

    def fact() -> bool:
        return not set(wanted) - {i for sink in sinks for i in ids(sink)}

    until(fact, seconds=20, what=f"{len(wanted)} events are delivered")


def claimed(harness: RelayHarness) -> dict[int, int]:
    """Return shard → epoch of the leases that ``harness`` holds."""
    harness.owns_all()
    return {shard: lease.epoch for shard, lease in harness.leases("s").held.items()}


@pytest.mark.fence("a relay that lost a shard writes a position")
def test_a_late_position_of_an_old_epoch_never_outranks_the_owner(database: Database) -> None:
    """Goes red when positions are ordered by number alone."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        epochs = claimed(harness)
        delivered(sink, emit(database, ["a"]))
        harness.settled()
        until(lambda: is_forward(harness), seconds=20, what="every position has been moved on")
        before = harness.store.positions("s", range(SHARDS))
        zombie = {s: (epoch - 1, Position(BEGINNING)) for s, epoch in epochs.items()}
        harness.store.settle("s", uuid4(), zombie, [], {})
        assert harness.store.positions("s", range(SHARDS)) == before


def is_forward(harness: RelayHarness) -> bool:
    """Return True if all stored positions are the same, so that nothing is left to be moved on."""
    return len(set(harness.store.positions("s", range(SHARDS)).values())) == 1


@pytest.mark.fence("a row is settled after its lease")
def test_an_expired_lease_of_a_row_settles_nothing(database: Database) -> None:
    """Goes red when delete_rows or update_rows no longer compare the lease."""
    with running(
        database.dsn, (spec("s", retry=RetryPolicy(base_seconds=3600.0, max_seconds=7200.0)), MemorySink(_fail))
    ) as harness:
        [event] = emit(database, ["a"])
        has(database, "select 1 from outbox.delivery where attempts = 1 and lease is null")
        query(
            database, "update outbox.delivery set due_at = now() + interval '1 hour', lease = %s returning 1", uuid4()
        )
        assert harness.store.delete_rows("s", [DeliveredRow(event, uuid4())]) == {}
        assert harness.store.update_rows("s", [RowUpdate(event, uuid4(), 7, "dead", None, "zombie")]) == set()
        assert query(database, "select state, attempts from outbox.delivery") == [("waiting", 1)]


def _fail(_event: StoredEvent, _attempt: int) -> Verdict:
    return Failed("not yet")


def test_a_claim_takes_no_more_than_was_asked_for_whatever_its_plan(database: Database) -> None:
    """Goes red when a plan asks for free shards once for each row: each time it finds others."""
    with database.connect(autocommit=True) as connection:
        connection.execute("vacuum outbox.shard")  # the planner then knows that it is empty
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        assert len(books.own("s", 20)) == 20


@pytest.mark.fence("two relays claim one row or shard")
def test_a_claim_passes_by_shards_that_a_settlement_has_locked(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when a settlement keeps no lock: its rows would appear behind the back of the next owner."""
    with ledger(database) as hand, database.connect() as settling:
        hand.register(("s", ["*"], "beginning"))
        hand.own("s")
        hand.lapse()
        [event] = hand.emit("a")
        row = hand.row(event)

        def run(name: str, values: Mapping[str, Any], *_: Any, **_named: Any) -> tuple[list[Any], int]:
            return settling.execute(statements()[name], values).fetchall(), 1

        with monkeypatch.context() as patched:
            patched.setattr(hand.store, "_run", run)
            hand.park("s", row)
        assert set(Ledger(database, hand.store).own("s")) == set(range(SHARDS)) - {row.shard}


@pytest.mark.fence("after a restore or a failover, a generation's number is given out again, for other routes")
def test_a_number_that_is_given_out_again_after_a_restore_is_no_generation_of_this_relay(
    database: Database,
) -> None:
    """A restore takes the newest registration back, and the next one of other relays gets its number."""
    old, new = MemorySink(), MemorySink()
    narrow = spec("s", patterns=("a",))
    wide = spec("s", patterns=("a", "b"))
    with running(database.dsn, (narrow, old), lease_seconds=SHORT_LEASE) as before:
        with database.connect() as connection:
            connection.execute("select outbox.emit('a', '0', key => 'k')")
        until(lambda: _count(old, 1), seconds=20, what="the relay delivers")
        before.settled()
        query(database, "update outbox.sink set patterns = '{a,b}' where name = 's' returning 1")
        with running(database.dsn, (wide, new), lease_seconds=SHORT_LEASE) as after:
            assert after.leases("s").generation == before.leases("s").generation
            with database.connect() as connection:
                connection.execute("select outbox.emit('b', '1', key => 'k'), outbox.emit('a', '2', key => 'k')")
            owns(before, 0)
            owns(after, SHARDS)
            until(lambda: _count(new, 2), seconds=20, what="the other relay delivers")
    assert [event.type for event in new.delivered] == ["b", "a"]
    assert len(old.delivered) == 1


@pytest.mark.fence("after a restore or a failover, a generation's number is given out again, for other routes")
def test_no_shard_is_claimed_for_other_routes_of_the_same_generation(database: Database) -> None:
    """Between two looks at the table of sinks. Goes red when only the number is compared."""
    with ledger(database) as books:
        books.register(("s", ["a", "b"], "beginning"))
        generation, routes = books.generations["s"], SinkRoutes(("a", "b"), "log")
        assert books.store.claim_shards("s", books.relay, generation, SHARDS, routes=routes) == [], "without a session"
        books.store.renew_sessions(books.relay, ["s"], 30.0)
        for others in (SinkRoutes(("a",), "log"), SinkRoutes(("b", "a"), "log"), SinkRoutes(("a", "b"), "rows")):
            assert books.store.claim_shards("s", books.relay, generation, SHARDS, routes=others) == []
        assert books.store.claim_shards("s", books.relay, generation + 1, SHARDS, routes=routes) == []
        assert len(books.store.claim_shards("s", books.relay, generation, SHARDS, routes=routes)) == SHARDS


def _count(sink: MemorySink, count: int) -> bool:
    return len(sink.delivered) >= count


@pytest.mark.parametrize(
    ("circuit", "said_seconds_ago", "crashes"),
    [("half-open", 80, 0), ("open", 100, 1)],
    ids=["down", "nobody says any more that it is down"],
)
def test_a_lapsed_lease_is_no_crash_while_the_destination_is_known_to_be_down(
    database: Database, circuit: str, said_seconds_ago: int, crashes: int
) -> None:
    """Else the shards of relays that come and go while it is down are all sent on one event at a time afterwards."""
    with ledger(database) as hand:
        hand.register(("s", ["*"], "beginning"))
        assert len(hand.own("s")) == SHARDS
        hand.lapse()
        hand.store.record_circuit("s", circuit, "it was refused", None, 0.0)
        hand.do("update outbox.sink set last_error_at = last_error_at - %s * interval '1 second'", said_seconds_ago)
        assert len(Ledger(database, hand.store).own("s")) == SHARDS
        assert hand.query("select distinct crashes from outbox.shard") == [(crashes,)]


@pytest.mark.fence("a claim of shards has no answer")
@pytest.mark.parametrize("late", [False, True], ids=["in effect at once", "in effect after the next claims"])
def test_shards_of_a_claim_without_an_answer_are_served_at_once_and_count_as_no_crash(
    database: Database, late: bool
) -> None:
    """Its COMMIT waits, as for a standby, and the relay has given it up."""
    sink = MemorySink()
    harness = RelayHarness(database.dsn, [(spec("s"), sink)], lease_seconds=30.0)
    with database.connect() as server:

        def claim_without_answer(*given: Any, known: Collection[int], routes: SinkRoutes) -> Any:
            harness.store.claim_shards = claim  # type: ignore[method-assign]
            names = ("sink", "owner", "generation", "most")
            parameters = {
                **dict(zip(names, given, strict=True)),
                "known": list(known),
                "patterns": list(routes.patterns),
                "claim": routes.claim,
            }
            cursor = server.execute(statements()["claim_shards"], parameters)
            assert cursor.rowcount == SHARDS
            if not late:
                server.commit()
            raise StatementFailed("the database did not answer within 10 s", "57014")

        claim, harness.store.claim_shards = harness.store.claim_shards, claim_without_answer  # type: ignore[method-assign]
        harness.start()
        if late:
            until(lambda: harness.store.calls["claim_shards"] > 1, seconds=20, what="the relay claims again")
        server.commit()
        owns(harness, SHARDS, seconds=20)
        delivered(sink, emit(database, ["a"]))
        assert query(database, "select distinct crashes, owner from outbox.shard") == [(0, harness.relay)]
    harness.crash()


@pytest.mark.fence("an older configuration reads past events that are newly routed")
@pytest.mark.parametrize("step", [1, -1], ids=["newer", "of a restored database"])
def test_a_tick_tells_of_other_patterns_before_a_window_passes_their_events(database: Database, step: int) -> None:
    """Between two looks at the table of sinks. Goes red when the generations of a tick are not compared.

    A restored database has an older generation. Goes red, too, when the first answer is only doubted.
    """
    old, new = MemorySink(), MemorySink()
    narrow, wide = spec("s", patterns=("a",)), spec("s", patterns=("a", "b"))
    with running(database.dsn, (narrow, old)) as before:
        query(database, "select outbox.emit('a', '0', key => 'k')")
        until(lambda: len(old.delivered) == 1, seconds=20, what="the older relay delivers")
        before.keeper.end()  # it would look by itself
        before.threads["keeper"].join(10)
        change = "update outbox.sink set patterns = '{a,b}', generation = generation + %s where name = 's' returning 1"
        query(database, change, step)
        query(database, "select outbox.emit('b', '1', key => 'k'), outbox.emit('a', '2', key => 'k')")
        owns(before, 0)
    with running(database.dsn, (wide, new)):
        until(lambda: len(new.delivered) >= 2, seconds=20, what="the newer relay delivers both types")
    assert [event.type for event in new.delivered] == ["b", "a"]
    assert len(old.delivered) == 1
