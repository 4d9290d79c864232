"""Relays join and leave at any time: who owns what, how soon, and that no hand-over repeats or reorders an event.

How soon is counted in what the relays do, renewals and looks, or in the database's time: never by a clock here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from outbox_relay.domain.event import SHARDS
from outbox_relay.relay.sink_spec import SinkSpec
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, spec
from tests.support.wait import until

LEASE_SECONDS = 3.0


@contextmanager
def party(dsn: str, expects: Collection[str] = ()) -> Generator[Callable[..., Any]]:
    """Yield a list of relays; those that are still in it at the end of the block crash."""
    harnesses: list[RelayHarness] = []

    def join(*sinks: tuple[SinkSpec, MemorySink]) -> RelayHarness:
        harnesses.append(RelayHarness(dsn, list(sinks), lease_seconds=LEASE_SECONDS, expects=expects))
        harnesses[-1].start()
        return harnesses[-1]

    try:
        yield join
    finally:
        for harness in harnesses:
            if any(thread.is_alive() for thread in harness.threads.values()):
                harness.crash(unjudged=True)
    for harness in harnesses:
        harness.judge()


def shares(harnesses: Sequence[RelayHarness], sink: str) -> list[int]:
    """Return the number of shards of `sink` that each relay that serves it owns, by its own account."""
    return [harness.keeper.held[sink] for harness in harnesses if sink in harness.keeper.held]


def even(harnesses: Sequence[RelayHarness], *sinks: str) -> None:
    """Wait until every shard of each sink is owned, and no relay owns two more than another."""

    def fact() -> bool:
        found = [shares(harnesses, sink) for sink in sinks]
        return all(sum(held) == SHARDS and max(held) - min(held) <= 1 for held in found)

    until(fact, seconds=60, what=f"{sinks} are shared evenly by {len(harnesses)}")


def two_sinks() -> list[tuple[SinkSpec, MemorySink]]:
    """Return two sinks that take everything."""
    return [(spec("s"), MemorySink()), (spec("t"), MemorySink())]


def test_after_a_join_every_sink_is_shared_evenly_within_two_renewals(database: Database) -> None:
    """Three relays join one after another, the third for one sink only. Goes red when a surplus is not released."""
    with party(database.dsn) as join:
        harnesses: list[RelayHarness] = []
        for sinks in (two_sinks(), two_sinks(), two_sinks()[:1]):
            before = [harness.store.calls["renew_sessions"] for harness in harnesses]
            harnesses.append(join(*sinks))
            even(harnesses, "s", "t")
            renewals = [each.store.calls["renew_sessions"] - b for each, b in zip(harnesses, before, strict=False)]
            assert all(count <= 2 for count in renewals), "within two renewals of each that was there"
        assert sorted(shares(harnesses, "s")) == [21, 21, 22]
        assert shares(harnesses, "t") == [32, 32], "a relay that does not serve a sink has no share of it"
        owners = query(database, "select sink, count(distinct owner), count(*) from outbox.shard group by sink")
        assert sorted(owners) == [("s", 3, SHARDS), ("t", 2, SHARDS)], "and the database says so"


def test_after_a_clean_leave_the_others_share_at_once(database: Database) -> None:
    """At their next look: no lease is waited for. Goes red when a leaving relay does not release or say good-bye."""
    with party(database.dsn) as join:
        harnesses = [join(*two_sinks()) for _ in range(3)]
        even(harnesses, "s", "t")
        left = harnesses.pop()
        looks = [harness.store.calls["sinks"] for harness in harnesses]
        left.stop()
        assert query(database, "select count(*) from outbox.shard where owner = %s", left.relay) == [(0,)]
        even(harnesses, "s", "t")
        assert all(harness.store.calls["sinks"] - before <= 3 for harness, before in zip(harnesses, looks, strict=True))
        assert query(database, "select max(crashes) from outbox.shard") == [(0,)]


def test_the_shards_of_a_relay_that_crashes_are_taken_over_when_its_lease_has_ended(database: Database) -> None:
    """No sooner, and each counts a crash."""
    with party(database.dsn) as join:
        crashed, other = join(*two_sinks()), join(*two_sinks())
        even([crashed, other], "s", "t")
        [(until_when,)] = query(database, "select min(lease_until) from outbox.session where owner = %s", crashed.relay)
        crashed.crash(unjudged=True)
        taken = "select clock_timestamp() from outbox.shard where crashes = 1 having count(*) = 64"
        [(at,)] = until(lambda: query(database, taken), seconds=60, what="the shards are taken over")
        assert at > until_when
        assert shares([other], "s") == [SHARDS]
