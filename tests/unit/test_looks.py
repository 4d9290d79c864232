"""The window that comes with a tick: whose it is, and when a relay asks for one. The store is a mock: its answers are
the point."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, cast

import pytest
import structlog
from psycopg.waiting import Ready, Wait

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.window import Tick
from outbox_relay.postgres import look_connection
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.rows import Look, TickResult, WindowRead, WindowRequest
from outbox_relay.relay import ticker as ticker_module
from outbox_relay.relay.ticker import Ticker

EVERY_SHARD = frozenset(range(64))


def a_request() -> WindowRequest:
    return WindowRequest(Tick(0, "3:3:", 3), 0, EVERY_SHARD, None)


class Looked:
    """A store whose ticks rise, and which answers every request with an empty window."""

    connection_losses = 0
    look_trouble = None

    def __init__(self, *, usable: bool = True, seconds: float = 0.001, fails: RelayError | None = None) -> None:
        self.requests: list[WindowRequest | None] = []
        self.connected = True
        self.ticks = self.given_up = 0
        self._usable = usable
        self._seconds = seconds
        self._fails = fails

    def prepare_look(self) -> bool:
        return self.connected

    def give_up_looks(self) -> None:
        self.given_up += 1

    async def arm(self, *, to_look: bool) -> None:
        """Do nothing: the server of the test has no mark."""

    async def tick(self) -> TickResult:
        self.ticks += 1
        return TickResult(Tick(len(self.requests) + self.ticks, "9:9:", 9), "a", datetime.now(UTC), 1)

    async def look(
        self, request: WindowRequest | None, patience: float, is_news: Callable[[TickResult, float], bool]
    ) -> Look:
        del patience, is_news
        self.requests.append(request)
        if self._fails is not None:
            raise self._fails
        tick = Tick(len(self.requests) + self.ticks, "9:9:", 9)
        events = list[StoredEvent]()
        window = None if request is None else WindowRead(request, tick, events, None, self._usable)
        result = TickResult(tick, "a", datetime.now(UTC), 1)
        return Look(result, window, time.monotonic(), (self._seconds,))


def a_ticker(store: Looked, lease_seconds: float = 15.0) -> Ticker:
    return Ticker(cast(Any, store), CommitListener(None), lease_seconds, structlog.get_logger())


async def test_window_is_used_only_for_its_request() -> None:
    store, mine, other, wake = Looked(), a_request(), a_request(), asyncio.Event()
    ticker = a_ticker(store)
    ticker.want(wake, mine)
    await ticker.refresh()
    assert wake.is_set()
    assert store.requests == [mine]
    assert ticker.window(other) is None
    assert ticker.window(None) is None
    found = ticker.window(mine)
    assert found is not None
    assert found.request is mine
    assert ticker.window(mine) is None, "it is used once"


async def test_window_is_forgotten_with_the_next_tick() -> None:
    store, mine, wake = Looked(), a_request(), asyncio.Event()
    ticker = a_ticker(store)
    ticker.want(wake, mine)
    await ticker.refresh()
    await ticker.refresh()
    assert ticker.window(mine) is None


async def test_window_is_requested_for_a_session_that_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, wake, other = Looked(), asyncio.Event(), asyncio.Event()
    ticker = a_ticker(store)
    ticker.want(wake, a_request())
    ticker.want(other, a_request())
    await ticker.refresh()
    ticker.want(wake, a_request())
    await ticker.refresh()
    assert store.requests == [None, None], "it was not alone a moment ago"
    monkeypatch.setattr(ticker_module, "ALONE_SECONDS", 0.0)
    ticker.want(wake, mine := a_request())
    await ticker.refresh()
    assert store.requests[-1] is mine


@pytest.mark.parametrize("store", [Looked(usable=False), Looked(seconds=1.0)], ids=["not usable", "slow"])
async def test_no_window_is_requested_after_one_that_was_of_no_use(store: Looked) -> None:
    ticker, wake = a_ticker(store), asyncio.Event()
    for _ in range(2):
        ticker.want(wake, a_request())
        await ticker.refresh()
    assert [request is None for request in store.requests] == [False, True]


@pytest.mark.parametrize("error", [StatementFailed("no"), DatabaseUnavailable("gone")], ids=["failed", "lost"])
async def test_no_window_is_requested_after_one_that_failed(error: RelayError) -> None:
    store = Looked(fails=error)
    ticker, wake = a_ticker(store), asyncio.Event()
    for _ in range(2):
        ticker.want(wake, a_request())
        with contextlib.suppress(DatabaseUnavailable):
            await ticker.refresh()
    assert [request is None for request in store.requests] == [False, True]


async def test_looks_that_fail_without_a_window_are_not_repeated_at_each_tick() -> None:
    store = Looked(fails=DatabaseUnusable("no right"))
    ticker = a_ticker(store)
    for _ in range(50):
        await ticker.refresh()
    assert store.requests == [None]
    assert store.ticks == 50
    assert store.given_up == 1, "another connection may lead to another server"


async def test_ticks_come_through_the_pool_while_there_is_no_connection_for_looks() -> None:
    store = Looked()
    store.connected = False
    ticker = a_ticker(store)
    await ticker.refresh()
    assert (store.requests, store.ticks) == ([], 1)
    store.connected = True
    await ticker.refresh()
    assert (store.requests, store.ticks) == ([None], 1)


async def test_no_window_is_requested_where_a_short_look_counts_as_slow() -> None:
    store, wake = Looked(), asyncio.Event()
    ticker = a_ticker(store, lease_seconds=3.0)
    ticker.want(wake, a_request())
    await ticker.refresh()
    assert store.requests == [None]


def test_an_answer_that_comes_in_pieces_ends_in_time() -> None:
    """Goes red when only a connection on which nothing arrives is given up."""
    pieces: list[object] = []

    def endless() -> Generator[Wait, Ready | int, None]:
        while True:
            pieces.append((yield Wait.R))

    limited = look_connection._limited(endless(), time.monotonic() - 1)  # pyright: ignore[reportPrivateUsage]
    next(limited)
    with pytest.raises(TimeoutError):
        limited.send(Ready.R)
    assert pieces == [Ready.R]
