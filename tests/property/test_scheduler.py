"""The judgement of the state machine on settlements of rows: it sees a broken fence, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import pytest

from outbox_relay.postgres.rows import DeliveredRow, RowUpdate
from tests.property.scheduler import LANE, Bench, Scheduler, SteppedStore, connected
from tests.support.database import Database

OWN, ENDED, OTHERS = uuid4(), uuid4(), uuid4()
"""The lease of this worker, one it had before, and one of another worker."""
FENCE = " and d.lease = r.lease"
LEASED = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, lease, lease_until, uid, type, payload,
                             content_type, created_at)
select 's', id, 0, 'waiting', false, now(), lease, now() + interval '1 h', gen_random_uuid(), 't', 'p', 't', now()
  from unnest(%s::bigint[], %s::uuid[]) r (id, lease)
returning 1"""

Named = list[tuple[int, UUID]]
STATEMENTS = pytest.mark.parametrize("statement", ["delete_rows", "update_rows"])


@asynccontextmanager
async def worker(database: Database, leases: list[UUID]) -> AsyncGenerator[tuple[Bench, SteppedStore]]:
    """Open the store of a worker without turns, on rows 1, 2, … under ``leases``."""
    bench = Bench(database.dsn, await connected(database.dsn), await connected(database.dsn))
    LANE.set("settle rows")
    try:
        await bench.ask(LEASED, list(range(1, len(leases) + 1)), leases)
        yield bench, SteppedStore(bench, "s", Scheduler(free=True))
    finally:
        await bench.close()


async def settle(store: SteppedStore, statement: str, named: Named) -> set[int]:
    """Settle the rows ``named`` under these leases."""
    if statement == "delete_rows":
        return set(await store.delete_rows("s", [DeliveredRow(row, lease) for row, lease in named]))
    return await store.update_rows("s", [RowUpdate(row, lease, 1, "waiting", 0.0, "no") for row, lease in named])


@STATEMENTS
@pytest.mark.parametrize(
    ("leases", "named", "settled", "refused"),
    [
        ([OWN], [(1, OWN)], {1}, 0),
        ([OWN], [(1, ENDED), (1, OWN)], {1}, 0),
        ([OTHERS], [(1, ENDED)], set[int](), 1),
        ([OWN, OTHERS], [(1, OWN), (2, ENDED)], {1}, 1),
        ([OWN, OTHERS], [(1, ENDED), (1, OWN), (2, ENDED), (2, OWN)], {1}, 1),
    ],
    ids=["its own", "its own, claimed twice", "another's", "one of each", "one of each, claimed twice"],
)
async def test_settlement_behind_its_fence_breaks_nothing(
    database: Database, statement: str, leases: list[UUID], named: Named, settled: set[int], refused: int
) -> None:
    async with worker(database, leases) as (bench, store):
        assert await settle(store, statement, named) == settled
        assert (bench.broken, bench.refused[statement]) == ([], refused)


@STATEMENTS
@pytest.mark.parametrize(
    ("leases", "named"),
    [
        ([OTHERS], [(1, OWN)]),
        ([OTHERS], [(1, ENDED), (1, OWN)]),
        ([OWN, OTHERS], [(1, OWN), (2, OWN)]),
        ([OWN, OTHERS], [(1, ENDED), (1, OWN), (2, ENDED)]),
    ],
    ids=["another's", "another's, claimed twice before", "one of each", "its own claimed twice, and another's"],
)
async def test_settlement_without_its_fence_is_seen(
    database: Database, statement: str, leases: list[UUID], named: Named
) -> None:
    async with worker(database, leases) as (bench, store):
        text = store._sql[statement]  # pyright: ignore[reportPrivateUsage]
        assert text.count(FENCE) == 1
        store._sql[statement] = text.replace(FENCE, "")  # pyright: ignore[reportPrivateUsage]
        await settle(store, statement, named)
        assert bench.broken == [f"{statement} changed what is another's"]
