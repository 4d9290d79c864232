"""Shards under more than one relay: shared, handed over, taken over; what a relay that lost one can no longer do."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import LeaseLost, SessionReset, StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.sink_spec import SinkRoutes
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.database import statements
from outbox_relay.postgres.rows import DeliveredRow, NewRow, RowUpdate
from outbox_relay.relay.leases import LeaseManager, fair_quota
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.ledger import Ledger, ledger
from tests.support.logs import RecordedLog
from tests.support.memory_sink import MemorySink, fails
from tests.support.relay_harness import LOST, RelayHarness, owns, running, spec
from tests.support.wait import auntil

SHORT_LEASE = 3.0
WAITING_SETTLEMENT = """
select pid from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock'
   and strpos(query, 'outbox_internal.settle(') > 0 and pid <> pg_backend_pid()"""


async def all_in_order(*sinks: MemorySink) -> bool:
    """Return True if the events of each key came in order at each sink."""
    return all(in_order(sink.delivered) for sink in sinks)


@pytest.mark.parametrize("relays", [1, 2, 3, 5, 64, 70])
def test_fair_shares_are_even_within_one_and_cover_all_shards(relays: int) -> None:
    shares = [fair_quota(relays, before) for before in range(relays)]
    assert sum(shares) == SHARDS
    assert max(shares) - min(shares) <= 1


async def test_two_relays_share_every_shard_once_and_no_handover_repeats_an_event(database: Database) -> None:
    one, two = MemorySink(), MemorySink()
    async with running(database.dsn, (spec("s"), one), lease_seconds=SHORT_LEASE) as first:
        await owns(first, SHARDS)
        wanted = emit(database, [f"k{n}" for n in range(300)])
        async with running(database.dsn, (spec("s"), two), lease_seconds=SHORT_LEASE) as second:
            await owns(first, SHARDS // 2)
            await owns(second, SHARDS // 2)
            assert query(database, "select count(distinct owner), count(*) from outbox.shard") == [(2, SHARDS)]
            for _ in range(5):
                wanted += emit(database, [f"k{n}" for n in range(300)])
            await delivered_together(wanted, one, two)
            await second.stop()
            await owns(first, SHARDS)
        wanted += emit(database, [f"k{n}" for n in range(300)])
        await delivered_together(wanted, one, two)
    together = ids(one) + ids(two)
    assert sorted(together) == wanted, "every event once"
    assert ids(two), "the second relay delivered its part"
    assert await all_in_order(one, two)


async def test_shards_that_are_lost_together_are_one_line(database: Database) -> None:
    """Goes red when a sink that was removed under a relay is 64 lines."""
    harness = RelayHarness(database.dsn, [(spec("s"), MemorySink())], lease_seconds=SHORT_LEASE)
    log = RecordedLog()
    await harness.store.open()
    tick = (await harness.ticker.refresh()).tick
    [generation] = (await harness.store.register_sinks([("s", ["*"], None)], tick)).values()
    lease_manager = LeaseManager(harness.store, harness.relay, "harness", "0", SHORT_LEASE, log)
    leases = lease_manager.add("s", generation)
    await lease_manager.round()
    await lease_manager.round()
    assert len(leases.held) == SHARDS
    with database.connect() as connection:
        connection.execute("update outbox.shard set owner = null, epoch = epoch + 1 where shard < 50")

    async def lost() -> bool:
        await lease_manager.round()
        return bool(log.warnings)

    await auntil(lost, seconds=20, what="the loss is noticed at a renewal")
    await harness.store.close()
    assert log.warnings == [("shards.lost", {"sink": "s", "shards": 50, "held": SHARDS - 50})]


async def delivered_together(wanted: list[int], *sinks: MemorySink) -> None:
    """Wait until the sinks together have been given all of `wanted`."""

    async def fact() -> bool:
        return not set(wanted) - {i for sink in sinks for i in ids(sink)}

    await auntil(fact, seconds=20, what=f"{len(wanted)} events are delivered")


async def test_the_shards_of_a_crashed_relay_are_taken_over_when_its_lease_ends(database: Database) -> None:
    blocked = asyncio.Event()

    async def script(_event: StoredEvent, _attempt: int) -> Verdict:
        blocked.set()
        await asyncio.Event().wait()
        return DELIVERED

    victim = RelayHarness(database.dsn, [(spec("s"), MemorySink(script))], lease_seconds=SHORT_LEASE)
    await victim.start()
    await victim.owns_all()
    wanted = emit(database, [f"k{n}" for n in range(100)])
    await asyncio.wait_for(blocked.wait(), 10)
    await victim.crash()
    successor = MemorySink()
    async with running(database.dsn, (spec("s"), successor), lease_seconds=SHORT_LEASE) as harness:
        await delivered(successor, wanted)
        await harness.settled()
        await has(database, "select 1 from outbox.shard having max(crashes) = 0")
    assert sorted(ids(successor)) == wanted, "in any order: each has another key, and leases may end one after another"


async def test_positions_survive_a_crash_up_to_the_last_flush(database: Database) -> None:
    """The next owner delivers no settled event again, and still holds back the rows in their order."""
    late: list[int] = []

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        return Failed("not yet") if event.id in late[:1] else DELIVERED

    slow = RetryPolicy(attempts=9, base_seconds=3600.0)
    late += emit(database, ["a", "a", "b"])
    sink = MemorySink(script)
    victim = RelayHarness(database.dsn, [(spec("s", retry=slow), sink)], lease_seconds=SHORT_LEASE)
    await victim.start()
    await delivered(sink, late[2:])
    await has(database, "select 1 from outbox.delivery having count(*) = 2")
    await has(database, "select 1 from outbox.standing having max(epoch) > 0")
    session = victim.relays[0].session
    assert session is not None
    await session.settler.flush(everything=True)
    await victim.crash()
    successor = MemorySink()
    async with running(database.dsn, (spec("s", retry=slow), successor), lease_seconds=SHORT_LEASE):
        more = emit(database, ["a", "b"])
        await delivered(successor, more[1:])
        await has(database, "select 1 from outbox.delivery where state = 'held' having count(*) = 2")
        query(database, "update outbox.delivery set due_at = now() where state = 'waiting' returning 1")
        await delivered(successor, [late[0], late[1], more[0]])
    assert ids(successor).count(late[2]) == 0, "settled before the crash"
    assert [event.id for event in successor.delivered if event.key == "a"] == [late[0], late[1], more[0]]


async def test_a_relay_that_cannot_renew_stops_before_its_lease_ends(database: Database) -> None:
    """Its own monotonic deadline, counted from before the renewal was sent: no call of the sink begins behind it."""
    sink = MemorySink()
    harness = RelayHarness(database.dsn, [(spec("s"), sink)], lease_seconds=SHORT_LEASE, expects={"lease_lost"})
    await harness.start()
    await harness.owns_all()
    await delivered(sink, emit(database, ["a"]))
    harness.tasks[0].cancel()  # ownership: nothing is renewed any more
    lease = min(lease.until for lease in harness.leases("s").held.values())

    async def past() -> bool:
        return time.monotonic() > lease

    await auntil(past, seconds=5, what="the lease has ended by the relay's own clock")
    [(owned,)] = query(database, "select count(*) from outbox.shard where lease_until > now()")
    before = len(sink.attempts)
    emit(database, ["a", "b", "c"])

    async def noticed() -> bool:
        return any(isinstance(error, LeaseLost) for error in harness.ended)

    await auntil(noticed, seconds=5, what="the session ends")
    assert len(sink.attempts) == before, "nothing was handed over"
    assert owned == SHARDS, "the database's lease outlasts the relay's own"
    await harness.crash()


async def claimed(harness: RelayHarness) -> dict[int, int]:
    """Return shard → epoch of the leases that ``harness`` holds."""
    await harness.owns_all()
    return {shard: lease.epoch for shard, lease in harness.leases("s").held.items()}


async def test_a_settlement_with_rows_at_an_old_epoch_writes_nothing(database: Database) -> None:
    """Goes red when the fence of outbox_internal.settle is removed: the row and the position would be written."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        epochs = await claimed(harness)
        [event] = emit(database, ["a"])
        await delivered(sink, [event])
        [(shard,)] = query(database, "select shard from outbox.event")
        row = NewRow(event, shard, "waiting", True, due_in=0.0)
        old = {s: epoch - 1 for s, epoch in epochs.items()}
        position = {shard: (old[shard], Position(BEGINNING))}
        before = query(database, "select count(*) from outbox.progress where %s = any (epochs)", old[shard])
        with pytest.raises(LeaseLost):
            await harness.store.settle("s", harness.relay, position, [row], old)
        with pytest.raises(LeaseLost):
            await harness.store.settle("s", uuid4(), position, [row], epochs)
        assert query(database, "select count(*) from outbox.delivery") == [(0,)]
        assert query(database, "select count(*) from outbox.progress where %s = any (epochs)", old[shard]) == before


async def test_nothing_is_settled_behind_a_settlement_that_failed(database: Database) -> None:
    """Goes red when a flush that waited for its turn may settle: its position covers the row that was not written.

    No lease is renewed while the shards are locked, however slow the machine is.
    """
    sink = MemorySink(fails(1))
    async with running(database.dsn, (spec("s"), sink), lease_seconds=90.0, expects=LOST) as harness:
        # Before its first event a session asks for its configuration, for which it locks the shards.
        await delivered(sink, emit(database, ["a"]))
        await harness.settled()
        with database.connect() as connection:
            connection.execute("select 1 from outbox.shard for update")
            [event] = emit(database, ["a"])
            await has(database, WAITING_SETTLEMENT)
            session = harness.relays[0].session
            assert session is not None
            behind = asyncio.ensure_future(session.settler.flush(everything=True))
            await asyncio.sleep(0)  # it begins, and waits for its turn
            # A settlement that has waited for too long is repeated, perhaps on another connection.
            await has(
                database, f"with w as materialized ({WAITING_SETTLEMENT}) select pg_terminate_backend(pid) from w"
            )
            with pytest.raises(SessionReset, match="sink s: a settlement did not finish"):
                await behind
        await delivered(sink, [event])


async def test_a_late_position_of_an_old_epoch_never_outranks_the_owner(database: Database) -> None:
    """Goes red when positions are ordered by number alone."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        epochs = await claimed(harness)
        await delivered(sink, emit(database, ["a"]))
        await harness.settled()
        session = harness.relays[0].session
        assert session is not None
        await session.settler.flush(everything=True)
        before = await harness.store.positions("s", range(SHARDS))
        zombie = {s: (epoch - 1, Position(BEGINNING)) for s, epoch in epochs.items()}
        await harness.store.settle("s", uuid4(), zombie, [], {})
        assert await harness.store.positions("s", range(SHARDS)) == before


async def test_shards_that_stand_at_one_place_share_a_row_of_the_ledger_each_at_its_epoch(database: Database) -> None:
    """A zombie's row of many shards outranks only where its epoch is the newest; one that does nowhere is trimmed."""
    rows = "select count(*), sum(cardinality(shards)) from outbox.progress"
    async with ledger(database) as hand:
        await hand.register(("s", ["*"], "beginning"))
        assert hand.query(rows) == [(1, SHARDS)]
        await hand.own("s")
        first, second = [(await hand.tick(), hand.emit("a")) for _ in range(2)]
        await hand.place("s", Position(first[0]))
        successor = Ledger(database, hand.store)
        hand.do("update outbox.shard set lease_until = clock_timestamp() - interval '1 second' where shard < 2")
        assert len(await successor.own("s")) == 2
        await successor.place("s", Position(second[0]), [0, 1])
        await hand.place("s", Position(BEGINNING))
        assert hand.query(rows) == [(4, 3 * SHARDS + 2)]
        await hand.store.trim_progress(1000)
        assert hand.query(rows) == [(2, SHARDS + 2)]
        stands = await hand.store.positions("s", range(SHARDS))
    assert stands == {shard: Position(second[0] if shard < 2 else BEGINNING) for shard in range(SHARDS)}


async def test_an_expired_lease_of_a_row_settles_nothing(database: Database) -> None:
    """Goes red when delete_rows or update_rows no longer compare the lease."""
    async with running(
        database.dsn, (spec("s", retry=RetryPolicy(base_seconds=3600.0, max_seconds=7200.0)), MemorySink(_fail))
    ) as harness:
        [event] = emit(database, ["a"])
        await has(database, "select 1 from outbox.delivery where attempts = 1 and lease is null")
        query(
            database, "update outbox.delivery set due_at = now() + interval '1 hour', lease = %s returning 1", uuid4()
        )
        assert await harness.store.delete_rows("s", [DeliveredRow(event, uuid4())]) == {}
        assert await harness.store.update_rows("s", [RowUpdate(event, uuid4(), 7, "dead", None, "zombie")]) == set()
        assert query(database, "select state, attempts from outbox.delivery") == [("waiting", 1)]


def _fail(_event: StoredEvent, _attempt: int) -> Verdict:
    return Failed("not yet")


async def test_a_claim_takes_no_more_than_was_asked_for_whatever_its_plan(database: Database) -> None:
    """Goes red when a plan asks for free shards once for each row: each time it finds others."""
    with database.connect(autocommit=True) as connection:
        connection.execute("vacuum outbox.shard")  # the planner then knows that it is empty
    async with ledger(database) as books:
        await books.register(("s", ["*"], "beginning"))
        assert len(await books.own("s", 20)) == 20


async def test_a_claim_passes_by_shards_that_a_settlement_has_locked(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        harness.tasks[0].cancel()  # ownership: it would claim its own lapsed shards again
        query(database, "update outbox.shard set lease_until = now() - interval '1 minute' returning 1")
        with database.connect() as settling:
            settling.execute("select 1 from outbox.shard where shard < 10 for share")
            got = await harness.store.claim_shards("s", uuid4(), harness.leases("s").generation, 30.0, SHARDS)
        assert {c.shard for c in got} == set(range(10, SHARDS))


async def test_a_relay_whose_shard_was_taken_starts_again_and_loses_nothing(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE, expects={"lease_lost"}) as harness:
        await harness.owns_all()
        query(database, "update outbox.shard set owner = %s, epoch = epoch + 1 where shard < 32 returning 1", uuid4())
        await auntil(lambda: _ended(harness), seconds=10, what="the session ends")
        await delivered(sink, emit(database, [f"k{n}" for n in range(100)]))
    assert in_order(sink.delivered)


async def _ended(harness: RelayHarness) -> bool:
    return any(isinstance(error, SessionReset) for error in harness.ended)


async def test_a_paused_sink_is_released_by_all_and_resumed_where_it_stood(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), lease_seconds=SHORT_LEASE) as harness:
        await delivered(sink, emit(database, ["a"]))
        query(database, "update outbox.sink set paused = true returning 1")
        await owns(harness, 0)
        wanted = emit(database, ["a", "b"])
        assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
        query(database, "update outbox.sink set paused = false returning 1")
        await delivered(sink, wanted)
    assert len(ids(sink)) == 3


async def test_relays_with_older_patterns_drain_and_the_newer_ones_take_over(database: Database) -> None:
    """A rolling deploy: no position moves past events that only the new configuration routes."""
    old, new = MemorySink(), MemorySink()
    narrow = spec("s", patterns=("a",), types=("a",))
    wide = spec("s", patterns=("a", "b"), types=("a", "b"))

    def both() -> None:
        with database.connect() as connection:
            connection.execute("select outbox.emit('a', '1', key => 'k'), outbox.emit('b', '2', key => 'k')")

    async with running(database.dsn, (narrow, old), lease_seconds=SHORT_LEASE) as before:
        both()
        await auntil(lambda: _count(old, 1), seconds=10, what="the old relay delivers")
        async with running(database.dsn, (wide, new), lease_seconds=SHORT_LEASE) as after:
            both()  # the old relay still holds every shard
            await owns(before, 0)
            await owns(after, SHARDS)
            await auntil(lambda: _count(new, 2), seconds=10, what="the new relay delivers both types")
    assert [event.type for event in old.delivered] == ["a"]
    assert [event.type for event in new.delivered] == ["a", "b"]


@pytest.mark.parametrize("step", [1, -1], ids=["newer", "of a restored database"])
async def test_a_tick_tells_of_other_patterns_before_a_window_passes_their_events(
    database: Database, step: int
) -> None:
    """Between two looks at the table of sinks. Goes red when the generations of a tick are not compared.

    A restored database has an older generation. Goes red, too, when the first answer is only doubted.
    """
    old, new = MemorySink(), MemorySink()
    narrow = spec("s", patterns=("a",), types=("a",))
    wide = spec("s", patterns=("a", "b"), types=("a", "b"))
    async with running(database.dsn, (narrow, old)) as before:
        with database.connect() as connection:
            connection.execute("select outbox.emit('a', '0', key => 'k')")
        await auntil(lambda: _count(old, 1), seconds=20, what="the older relay delivers")
        before.tasks[0].cancel()  # ownership: it would look by itself
        query(
            database,
            "update outbox.sink set patterns = '{a,b}', generation = generation + %s where name = 's' returning 1",
            step,
        )
        with database.connect() as connection:
            connection.execute("select outbox.emit('b', '1', key => 'k'), outbox.emit('a', '2', key => 'k')")
        await owns(before, 0)
    async with running(database.dsn, (wide, new)):
        await auntil(lambda: _count(new, 2), seconds=20, what="the newer relay delivers both types")
    assert [event.type for event in new.delivered] == ["b", "a"]
    assert len(old.delivered) == 1


@pytest.mark.parametrize(
    "change", ["patterns = '{a,b}'", "claim = 'rows', generation = generation"], ids=["patterns", "claim"]
)
async def test_a_number_that_is_given_out_again_after_a_restore_is_no_generation_of_this_relay(
    database: Database, change: str
) -> None:
    """A restore takes the newest registration back, and the next one of other relays gets its number."""
    old, new = MemorySink(), MemorySink()
    narrow = spec("s", patterns=("a",), types=("a",))
    other = replace(narrow, claim="rows") if "claim" in change else spec("s", patterns=("a", "b"), types=("a", "b"))
    async with running(database.dsn, (narrow, old), lease_seconds=SHORT_LEASE) as before:
        with database.connect() as connection:
            connection.execute("select outbox.emit('a', '0', key => 'k')")
        await auntil(lambda: _count(old, 1), seconds=20, what="the relay delivers")
        await before.settled()
        query(database, f"update outbox.sink set {change} where name = 's' returning 1")
        async with running(database.dsn, (other, new), lease_seconds=SHORT_LEASE) as after:
            assert after.leases("s").generation == before.leases("s").generation
            with database.connect() as connection:
                connection.execute("select outbox.emit('b', '1', key => 'k'), outbox.emit('a', '2', key => 'k')")
            await owns(before, 0)
            await owns(after, SHARDS)
            wanted = ["a"] if "claim" in change else ["b", "a"]
            await auntil(lambda: _count(new, len(wanted)), seconds=20, what="the other relay delivers")
    assert [event.type for event in new.delivered] == wanted
    assert len(old.delivered) == 1


async def test_no_shard_is_claimed_for_other_routes_of_the_same_generation(database: Database) -> None:
    """Between two looks at the table of sinks. Goes red when only the number is compared."""
    async with ledger(database) as books:
        await books.register(("s", ["a", "b"], "beginning"))
        generation, routes = books.generations["s"], SinkRoutes(("a", "b"), "log")
        for others in (SinkRoutes(("a",), "log"), SinkRoutes(("b", "a"), "log"), SinkRoutes(("a", "b"), "rows")):
            assert await books.store.claim_shards("s", uuid4(), generation, 30.0, SHARDS, routes=others) == []
        assert await books.store.claim_shards("s", uuid4(), generation + 1, 30.0, SHARDS, routes=routes) == []
        assert len(await books.store.claim_shards("s", uuid4(), generation, 30.0, SHARDS, routes=routes)) == SHARDS


async def _count(sink: MemorySink, count: int) -> bool:
    return len(sink.delivered) >= count


async def test_a_stop_finishes_settles_and_releases(database: Database) -> None:
    sink = MemorySink()
    harness = RelayHarness(database.dsn, [(spec("s"), sink)])
    await harness.start()
    await harness.owns_all()
    wanted = emit(database, [f"k{n}" for n in range(1000)])
    await delivered(sink, wanted[:1])
    await harness.stop()
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
    assert query(database, "select count(*) from outbox.relay") == [(0,)]
    successor = MemorySink()
    async with running(database.dsn, (spec("s"), successor)) as next_harness:
        await delivered_together(wanted, sink, successor)
        await next_harness.settled()
    assert not set(ids(sink)) & set(ids(successor)), "nothing twice"


def test_the_helpers_of_this_file_can_tell_disorder() -> None:
    event: Any = StoredEvent(2, 0, "u", "t", "k", b"", "c", None, None, None)  # type: ignore[arg-type]
    earlier: Any = event._replace(id=1)
    assert in_order([earlier, event])
    assert not in_order([event, earlier])


@pytest.mark.parametrize(
    ("circuit", "said_seconds_ago", "crashes"),
    [("closed", 0, 1), ("open", 0, 0), ("half-open", 80, 0), ("open", 100, 1)],
    ids=["up", "down", "down, said a while ago", "nobody says any more that it is down"],
)
async def test_a_lapsed_lease_is_no_crash_while_the_destination_is_known_to_be_down(
    database: Database, circuit: str, said_seconds_ago: int, crashes: int
) -> None:
    """Else the shards of relays that come and go while it is down are all sent on one event at a time afterwards."""
    async with ledger(database) as hand:
        await hand.register(("s", ["*"], "beginning"))
        assert len(await hand.own("s", lease_seconds=0.0)) == SHARDS
        await hand.store.record_circuit("s", circuit, "it was refused", None, 0.0)
        hand.do("update outbox.sink set last_error_at = last_error_at - %s * interval '1 second'", said_seconds_ago)
        assert len(await Ledger(database, hand.store).own("s")) == SHARDS
        assert hand.query("select distinct crashes from outbox.shard") == [(crashes,)]


@pytest.mark.parametrize("late", [False, True], ids=["in effect at once", "in effect after the next claims"])
async def test_shards_of_a_claim_without_an_answer_are_served_at_once_and_count_as_no_crash(
    database: Database, late: bool
) -> None:
    """Its COMMIT waits, as for a standby, and the relay has given it up."""
    sink = MemorySink()
    harness = RelayHarness(database.dsn, [(spec("s"), sink)], lease_seconds=30.0)
    async with await database.aconnect() as server:

        async def claim_without_answer(*given: Any, routes: SinkRoutes) -> Any:
            harness.store.claim_shards = claim  # type: ignore[method-assign]
            names = ("sink", "owner", "generation", "lease", "most", "free_for")
            parameters = {
                **dict(zip(names, given, strict=True)),
                "lapsed_for": 0.0,
                "patterns": list(routes.patterns),
                "claim": routes.claim,
            }
            cursor = await server.execute(statements()["claim_shards"], parameters)
            assert cursor.rowcount == SHARDS
            if not late:
                await server.commit()
            raise StatementFailed("the database did not answer within 10 s", "57014")

        claim, harness.store.claim_shards = harness.store.claim_shards, claim_without_answer  # type: ignore[method-assign]
        await harness.start()
        await auntil(lambda: claimed_again(harness), seconds=20, what="the relay claims again")
        await server.commit()
        await owns(harness, SHARDS, seconds=20)
        await delivered(sink, emit(database, ["a"]))
        assert query(database, "select distinct crashes, owner from outbox.shard") == [(0, harness.relay)]
    await harness.crash()


async def claimed_again(harness: RelayHarness) -> bool:
    return harness.store.calls["release_unknown_shards"] > 1
