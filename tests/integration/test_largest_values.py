"""Stored counters at the ends of their types: only what has one is affected, and it says why."""

from __future__ import annotations

import pytest

from outbox_relay.domain.outcomes import RetryPolicy
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.memory_sink import MemorySink, fails
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.sink_actions import call
from tests.support.wait import until

LATER = RetryPolicy(attempts=5, base_seconds=3600, max_seconds=3600, jitter=0)
ODD = "update outbox.delivery set {} where id = %s"
DUE = "update outbox.delivery set due_at = now()"


def rows_that_wait(database: Database) -> list[int]:
    """Return the ids of three rows, of which each has failed once and waits for an hour."""
    failing = RelayHarness(database.dsn, [(spec("s", retry=LATER), MemorySink(fails(1, None)))])
    failing.start()
    wanted = emit(database, ["a", None, "b"])
    has(database, "select 1 from outbox.delivery having count(*) = 3")
    failing.stop()
    return wanted


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ("claims = 2147483647", "claimed 2147483646 times without an outcome"),
        ("claims = 2147483646", "claimed 2147483646 times without an outcome"),
    ],
)
def test_a_row_of_as_many_claims_as_there_can_be_is_dead_and_others_are_delivered(
    database: Database, odd: str, error: str
) -> None:
    first, second, third = rows_that_wait(database)
    call(database, ODD.format(odd), second)
    call(database, DUE)
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)):
        delivered(sink, [first, third])
        [(state, said)] = has(
            database, "select state, last_error from outbox.delivery where id = %s and state = 'dead'", second
        )
    assert state == "dead"
    assert said.startswith(error)


def test_shards_at_the_last_epoch_or_of_many_crashes_keep_no_other_shard_from_being_claimed(
    database: Database,
) -> None:
    with running(database.dsn, (spec("s"), MemorySink())) as harness:
        harness.owns_all()
    call(database, "update outbox.shard set owner = gen_random_uuid(), crashes = 2147483647")
    call(database, "update outbox.shard set epoch = 9223372036854775807, owner = null where shard = 0")
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:

        def owns_others() -> bool:
            return harness.keeper.held["s"] == 63

        until(owns_others, seconds=20, what="all other shards are owned")
        keys = [key for key, shard in _shards(database) if shard != 0]
        delivered(sink, wanted := emit(database, keys))
    assert set(wanted) <= set(ids(sink))


def _shards(database: Database) -> list[tuple[str, int]]:
    found = call(
        database, "select k, outbox_internal.shard_of(k, null) as shard from unnest('{a,b,c,d,e,f}'::text[]) k"
    )
    return [(row["k"], row["shard"]) for row in found]
