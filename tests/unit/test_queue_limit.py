"""The bound of the rows of a queue: when rows are counted, and what counts between two counts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.relay import queue_limit
from outbox_relay.relay.queue_limit import QueueLimit
from outbox_relay.relay.sink_leases import Lease, SinkLeases


class Rows:
    """A store of some rows, which are counted in pages. Counts time out while ``fails`` is set."""

    def __init__(self, rows: int) -> None:
        self.rows, self.pages, self.fails = rows, 0, False

    async def count_queued(self, _sink: str, after: int, most: int) -> tuple[int, int]:
        self.pages += 1
        if self.fails:
            raise StatementFailed("canceling statement due to statement timeout", "57014")
        found = min(most, self.rows - after)
        return found, after + found


def a_limit(store: Rows, rows_max: int, held: int = 64) -> QueueLimit:
    """Return the limit of a sink of whose shards ``held`` are owned."""
    leases = SinkLeases("s", 1)
    leases.grant(dict.fromkeys(range(held), Lease(1, lease_clock() + 60, 0)))
    spec = SinkSpec("s", ("*",), None, claim="rows", ordered=False, rows_max=rows_max)
    return QueueLimit(cast("Any", store), spec, cast("Any", None), asyncio.Event(), leases)


async def count(limit: QueueLimit) -> None:
    """Let the limit count once, if it wants to."""
    running = asyncio.create_task(limit.run())
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_row_is_made_before_the_first_count() -> None:
    limit = a_limit(Rows(0), 100)
    assert not limit.admits()
    await count(limit)
    assert limit.admits()


async def test_rows_are_counted_in_pages_and_no_further_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_limit, "COUNT_PAGE", 10)
    store = Rows(35)
    await count(limit := a_limit(store, 100))
    assert (store.pages, limit.full) == (4, False)
    store = Rows(1000)
    await count(limit := a_limit(store, 20))
    assert (store.pages, limit.full) == (3, True)
    assert not limit.admits()
    assert limit.notice == "20 events wait as rows, and no more than that may (rows_max): the sink waits for them"


async def test_rows_are_counted_again_only_once_the_bound_may_be_near() -> None:
    store = Rows(0)
    await count(limit := a_limit(store, 100))
    limit.add(49)
    await count(limit)
    assert store.pages == 1
    limit.add(1)
    await count(limit)
    assert store.pages == 2


async def test_rows_of_this_relay_count_for_those_of_all_relays() -> None:
    await count(limit := a_limit(Rows(0), 100, held=32))
    limit.add(49)
    assert limit.admits()
    limit.add(1)
    assert not limit.admits()
    limit.remove(1)
    assert limit.admits()
    assert limit.notice is None


async def test_a_queue_that_cannot_be_counted_is_full_until_rows_are_delivered() -> None:
    store = Rows(100)
    await count(limit := a_limit(store, 100))
    store.fails = True
    await count(limit)
    assert not limit.admits()
    limit.remove(5)
    assert limit.admits()
    limit.add(5)
    assert not limit.admits()


async def test_the_reason_why_rows_cannot_be_made_is_shown_until_they_can() -> None:
    await count(limit := a_limit(Rows(0), 100))
    limit.report_failure("no space left")
    assert limit.notice == "events do not become rows: no space left"
    limit.report_failure(None)
    assert limit.notice is None
