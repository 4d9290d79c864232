"""Relays join and leave at any time: who owns what, how soon, and that no hand-over repeats or reorders an event.

How soon is counted in what the relays do, renewals and looks, or in the database's time: never by a clock here.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.sinks import Sink
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, first_deliveries, in_order
from tests.support.kafka import KafkaBroker
from tests.support.memory_sink import MemorySink
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import RelayHarness, spec
from tests.support.service import RelayService
from tests.support.wait import auntil, until

LEASE_SECONDS = 3.0
POLL_SECONDS = LEASE_SECONDS / 6
"""The interval at which a relay looks for shards without an owner, with this lease."""


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Return a function that shows a measured figure among pytest's own lines."""

    def show(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return show


@asynccontextmanager
async def party(dsn: str, expects: Collection[str] = ()) -> AsyncGenerator[Callable[..., Any]]:
    """Yield a list of relays; those that are still in it at the end of the block crash."""
    harnesses: list[RelayHarness] = []

    async def join(*sinks: tuple[SinkSpec, Sink]) -> RelayHarness:
        harnesses.append(RelayHarness(dsn, list(sinks), lease_seconds=LEASE_SECONDS, expects=expects))
        await harnesses[-1].start()
        return harnesses[-1]

    try:
        yield join
    finally:
        for harness in harnesses:
            if any(not task.done() for task in harness.tasks):
                await harness.crash(unjudged=True)
    for harness in harnesses:
        harness.judge()


def shares(harnesses: Sequence[RelayHarness], sink: str) -> list[int]:
    """Return the number of shards of `sink` that each relay that serves it owns, by its own account."""
    return [harness.lease_manager.held[sink] for harness in harnesses if sink in harness.lease_manager.held]


async def even(harnesses: Sequence[RelayHarness], *sinks: str) -> None:
    """Wait until every shard of each sink is owned, and no relay owns two more than another."""

    async def fact() -> bool:
        found = [shares(harnesses, sink) for sink in sinks]
        return all(sum(held) == SHARDS and max(held) - min(held) <= 1 for held in found)

    await auntil(fact, seconds=60, what=f"{sinks} are shared evenly by {len(harnesses)}")


def two_sinks() -> list[tuple[SinkSpec, Sink]]:
    """Return two sinks that take everything."""
    return [(spec("s"), MemorySink()), (spec("t"), MemorySink())]


async def test_after_a_join_every_sink_is_shared_evenly_within_two_renewals(database: Database) -> None:
    """Three relays join one after another, the third for one sink only. Goes red when a surplus is not released."""
    async with party(database.dsn) as join:
        harnesses: list[RelayHarness] = []
        for sinks in (two_sinks(), two_sinks(), two_sinks()[:1]):
            before = [harness.store.calls["renew_shards"] for harness in harnesses]
            harnesses.append(await join(*sinks))
            await even(harnesses, "s", "t")
            renewals = [harness.store.calls["renew_shards"] - b for harness, b in zip(harnesses, before, strict=False)]
            assert all(count <= 2 for count in renewals), "within two renewals of each that was there"
        assert sorted(shares(harnesses, "s")) == [21, 21, 22]
        assert shares(harnesses, "t") == [32, 32], "a relay that does not serve a sink has no share of it"
        owners = query(database, "select sink, count(distinct owner), count(*) from outbox.shard group by sink")
        assert sorted(owners) == [("s", 3, SHARDS), ("t", 2, SHARDS)], "and the database says so"


async def test_after_a_clean_leave_the_others_share_at_once(database: Database) -> None:
    """At their next look: no lease is waited for. Goes red when a leaving relay does not release or say good-bye."""
    async with party(database.dsn) as join:
        harnesses = [await join(*two_sinks()) for _ in range(3)]
        await even(harnesses, "s", "t")
        left = harnesses.pop()
        looks = [harness.store.calls["sinks"] for harness in harnesses]
        await left.stop()
        assert query(database, "select count(*) from outbox.shard where owner = %s", left.relay) == [(0,)]
        await even(harnesses, "s", "t")
        assert all(harness.store.calls["sinks"] - before <= 3 for harness, before in zip(harnesses, looks, strict=True))
        [(crashes, latest)] = query(
            database, "select max(crashes), max(lease_until) < now() + interval '1 hour' from outbox.shard"
        )
        assert (crashes, latest) == (0, True)


async def test_a_relay_that_is_told_to_stop_while_it_claims_keeps_nothing(database: Database) -> None:
    """Goes red when shards that were claimed meanwhile stay with a relay that is not drained any more."""
    harness = RelayHarness(database.dsn, [(spec("s"), MemorySink())], lease_seconds=LEASE_SECONDS)
    claim = harness.store.claim_shards

    async def claim_and_be_told(*arguments: Any, **named: Any) -> Any:
        found = await claim(*arguments, **named)
        harness.stopping.set()
        await harness.lease_manager.stop()
        # A session that begins only now waits for this claim, and cannot end before it.
        await asyncio.wait({harness.tasks[2]}, timeout=3)
        return found

    harness.store.claim_shards = claim_and_be_told  # type: ignore[method-assign]
    await harness.start()
    await asyncio.wait_for(harness.tasks[2], 30)

    async def released() -> bool:
        return query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]

    await auntil(released, seconds=10, what="nothing is owned")
    assert harness.store.calls["claim_shards"] == 1
    assert harness.lease_manager.held == {"s": 0}
    await harness.crash()


async def test_shards_that_are_given_up_while_the_destination_is_down_repeat_nothing_that_was_delivered(
    database: Database,
) -> None:
    """An event that precedes a delivered one becomes a row, once all requests are answered: red without either."""
    delivered_behind, answer = asyncio.Event(), asyncio.Event()

    async def script(event: StoredEvent, _attempt: int) -> Verdict:
        if event.key == "stuck":
            await delivered_behind.wait()
            return Unavailable("it is down")
        if event.key == "slow":
            await answer.wait()
        return DELIVERED

    sink, circuit = MemorySink(script, keeps_order=False), CircuitPolicy(open_after=1, probe_seconds=0.5)
    async with party(database.dsn, {"handed_over"}) as join:
        leaver = await join((spec("s", circuit=circuit, park_after_seconds=60.0), sink))
        await leaver.owns_all()
        stuck, slow, a, b, behind = emit(database, ["stuck", "slow", "a", "b", "stuck"])
        await delivered(sink, [a, b])
        delivered_behind.set()
        await auntil(lambda: is_open(leaver), seconds=10, what="the circuit is open")
        stopped = asyncio.ensure_future(leaver.stop())
        await auntil(lambda: gives_up(leaver), seconds=10, what="it gives its shards up")
        answer.set()
        await stopped
        successor = MemorySink()
        await join((spec("s"), successor))
        await delivered(successor, [stuck, behind])
        assert [event.id for event in sink.delivered] == [a, b, slow]
        assert [event.id for event in successor.delivered] == [stuck, behind]


async def gives_up(harness: RelayHarness) -> bool:
    """Return True if it sends no more: it waits for requests under way, or has ended its session."""
    session = harness.relays[0].session
    assert session is not None
    return session.breaker.handing_over or not harness.leases("s").held


async def is_open(harness: RelayHarness) -> bool:
    """Return True if the circuit of its first sink is not closed."""
    return harness.relays[0].circuit != "closed"


async def test_a_crashed_relays_shards_are_claimed_at_the_first_look_after_their_lease(
    database: Database, report: Callable[[str], None]
) -> None:
    """Measured by the database: from the end of the leases to the claim."""
    async with party(database.dsn) as join:
        harnesses = [await join(*two_sinks()), await join(*two_sinks())]
        await even(harnesses, "s", "t")
        survivor, victim = harnesses
        await victim.crash()
        lapsing = query(database, "select sink, shard, lease_until from outbox.shard where owner = %s", victim.relay)
        assert len(lapsing) == SHARDS
        looks = survivor.store.calls["sinks"]
        await even([survivor], "s", "t")
        claims = "select sink, shard, lease_until - %s * interval '1 second' from outbox.shard where crashes = 1"
        claimed = {(sink, shard): at for sink, shard, at in query(database, claims, LEASE_SECONDS)}
        assert claimed.keys() == {(sink, shard) for sink, shard, _ in lapsing}
        late = [(claimed[sink, shard] - lapsed).total_seconds() for sink, shard, lapsed in lapsing]
        looked = survivor.store.calls["sinks"] - looks
    report(
        f"{len(late)} shards of a crashed relay: claimed {min(late):.2f} to {max(late):.2f} s after the end of their"
        f" lease of {LEASE_SECONDS:g} s; a look every {POLL_SECONDS:g} s, {looked} looks"
    )
    assert min(late) >= 0, "never before the lease has ended"
    # A renewal may have come between the claim and the question; and a busy machine is late by itself.
    assert max(late) <= POLL_SECONDS + LEASE_SECONDS


class Shop:
    """Emits for some keys all the time, as long as it is told to."""

    def __init__(self, database: Database, keys: int) -> None:
        self.ids: list[int] = []
        self._database = database
        self._keys = [f"k{n}" for n in range(keys)]
        self._open = True

    async def run(self) -> None:
        """Emit, one transaction after another."""
        while self._open:
            self.ids += await asyncio.to_thread(emit, self._database, self._keys)

    def close(self) -> None:
        """Emit no more."""
        self._open = False


SLOW_BATCH = 400
"""Events in one call of a slow sink: 0.2 s on average. Two calls of 4,000 would outlast the lease of 3 s."""


def slowly(rng: random.Random, *, fails: bool) -> Any:
    """Return a script by which some deliveries take a moment, and with ``fails`` some fail at their first attempt."""

    async def script(event: StoredEvent, attempt: int) -> Verdict:
        if rng.random() < 0.02:
            await asyncio.sleep(rng.random() * 0.05)  # a destination that takes its time
        if fails and attempt == 1 and event.id % 97 == 0:
            return Failed("not now", 500)
        return DELIVERED

    return script


@pytest.mark.parametrize(
    ("keeps_order", "fails"),
    [
        pytest.param(True, False, id="batches"),
        pytest.param(False, True, id="failing requests", marks=pytest.mark.slow),
    ],
)
async def test_joins_and_leaves_under_load_repeat_and_reorder_nothing(
    database: Database, keeps_order: bool, fails: bool, report: Callable[[str], None]
) -> None:
    """Seven joins and leaves of up to three relays. All sinks note what they get in one list, as one destination."""
    seed = 7
    rng = random.Random(seed)
    arrived: list[StoredEvent] = []
    shop = Shop(database, keys=40)
    selling = asyncio.create_task(shop.run())
    deliverers = 0
    try:
        async with party(database.dsn) as join:
            harnesses: list[RelayHarness] = []
            for _ in range(7):
                if len(harnesses) < 2 or (len(harnesses) < 3 and rng.random() < 0.5):
                    sink = MemorySink(slowly(rng, fails=fails), keeps_order=keeps_order)
                    sink.max_batch = min(sink.max_batch, SLOW_BATCH)
                    sink.delivered = arrived
                    harnesses.append(await join((spec("s"), sink)))
                    deliverers += 1
                else:
                    await harnesses.pop(rng.randrange(len(harnesses))).stop()
                await even(harnesses, "s")
                await _grows(arrived)
            shop.close()
            await selling
            await _all_there(arrived, shop.ids)
            for harness in harnesses:
                await harness.stop()
            assert not any(harness.ended for harness in harnesses), "no session ended by an error"
    finally:
        shop.close()
    ids = [event.id for event in arrived]
    duplicates = len(ids) - len(set(ids))
    report(f"seed {seed}: {len(shop.ids)} events, {deliverers} relays joined: {duplicates} duplicates")
    assert sorted(ids) == shop.ids, "every event once"
    assert in_order(arrived)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


async def _grows(arrived: list[StoredEvent]) -> None:
    before = len(arrived)

    async def fact() -> bool:
        return len(arrived) > before + 200

    await auntil(fact, seconds=60, what="deliveries go on")


async def _all_there(arrived: list[StoredEvent], wanted: Sequence[int]) -> None:
    async def fact() -> bool:
        return len({event.id for event in arrived}) >= len(wanted)

    await auntil(fact, seconds=60, what=f"{len(wanted)} events are delivered")


def test_the_shards_of_a_killed_process_are_taken_over_within_its_lease_and_a_look(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path, report: Callable[[str], None]
) -> None:
    """Real processes, SIGKILL; the time is the database's, from the death to the last claim."""
    kafka.create_topic(topic, partitions=1)
    text = kafka_config(database.dsn, kafka, topic, lease_seconds=3)
    owners = "select count(*) from outbox.shard group by owner order by owner"
    with RelayService(tmp_path, text, "one") as one, RelayService(tmp_path, text, "two") as two:
        until(lambda: query(database, owners) == [(32,), (32,)], seconds=60, what="the shards are shared evenly")
        one.kill()
        [(died,)] = query(database, "select clock_timestamp()")
        claims = "select count(*), min(lease_until) - interval '3 seconds' from outbox.shard where crashes = 1"
        until(lambda: query(database, claims)[0][0] == SHARDS // 2, seconds=60, what="the shards are taken over")
        [(_, claimed)] = query(database, claims)
        assert two.ready
    seconds = (claimed - died).total_seconds()
    report(f"shards of a killed relay, lease 3 s: owned again {seconds:.2f} s after its death")
    assert seconds <= 8, "4 s, and as much again for a busy machine"


def test_the_judge_of_this_file_sees_duplicates_and_disorder() -> None:
    event: Any = StoredEvent(2, 0, "u", "t", "k", b"", "c", None, None, None)  # type: ignore[arg-type]
    earlier: Any = event._replace(id=1)
    assert first_deliveries([event, earlier, event]) == {"k": [2, 1]}
    assert not in_order([event, earlier])
