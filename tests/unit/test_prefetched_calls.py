"""Calls that a worker of a Python sink gets ahead: they wait there until others end, and never for long."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.sinks.python import pool, worker_process
from outbox_relay.sinks.python.pool import BUSY
from tests.support.python_sink import SECONDS, RunningSink, becomes_false, python_sink

pytestmark = pytest.mark.processes

NOT_TRIED = Unavailable(BUSY, behind=True, untouched=True)
"""The verdict of a call that waited in a worker for too long."""
SLOTS = 4
"""The sink makes as many calls at once, and takes as many ahead."""


@asynccontextmanager
async def busy_sink(directory: Path) -> AsyncGenerator[tuple[RunningSink, Sequence[asyncio.Future[Verdict]]]]:
    """Open a sink whose handlers are all called, and wait until they are told to end."""
    async with python_sink("asynchronous", directory, max_in_flight=SLOTS) as running:
        assert await running.deliver("first", again=True) == DELIVERED
        calls = [asyncio.ensure_future(running.deliver("wait")) for _ in range(SLOTS)]
        await running.noted("steps", SLOTS)
        yield running, calls


def tell(running: RunningSink) -> None:
    """Let the handlers end."""
    (running.directory / "told").touch()


async def waits(running: RunningSink) -> None:
    """Wait until the worker has got one call more than it makes at once."""
    [process] = running.sink.processes
    await becomes_false(lambda: len(process.calls) <= SLOTS, "a call is sent ahead")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls wait for as long as the test takes."""
    monkeypatch.setattr(worker_process, "PREFETCH_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_call_that_is_sent_ahead_begins_when_another_has_ended(tmp_path: Path) -> None:
    """Goes red when a worker makes more calls at once than ``max_in_flight``, or none in place of one that ends."""
    async with busy_sink(tmp_path) as (running, calls):
        assert running.sink.prefetch == SLOTS
        ahead = asyncio.ensure_future(running.deliver("wait"))
        await waits(running)
        tell(running)
        verdicts = await asyncio.wait_for(asyncio.gather(*calls, ahead), SECONDS)
        assert verdicts == [DELIVERED] * (SLOTS + 1)
        steps = running.notes("steps")
        assert steps.index("ends") == SLOTS, "the last call begins after the first has ended"


async def test_a_call_that_waits_for_long_goes_back(tmp_path: Path) -> None:
    """Goes red when slow handlers keep the rows behind them from other relays."""
    async with busy_sink(tmp_path) as (running, calls):
        verdict = await asyncio.wait_for(running.deliver("ahead"), SECONDS)
        assert verdict == NOT_TRIED
        assert running.notes("received") == ["first"]
        tell(running)
        assert await asyncio.gather(*calls) == [DELIVERED] * SLOTS
        assert await running.deliver("last") == DELIVERED


@pytest.mark.usefixtures("patient")
async def test_no_handler_is_called_for_a_call_that_was_cancelled_while_it_waited(tmp_path: Path) -> None:
    async with busy_sink(tmp_path) as (running, calls):
        ahead = asyncio.ensure_future(running.deliver("ahead"))
        await waits(running)
        ahead.cancel()
        [process] = running.sink.processes
        await becomes_false(lambda: len(process.calls) > SLOTS, "it ends before the others")
        tell(running)
        assert await asyncio.gather(*calls) == [DELIVERED] * SLOTS
        assert await running.deliver("last") == DELIVERED
        assert running.notes("received") == ["first", "last"]


@pytest.mark.usefixtures("patient")
async def test_a_reset_ends_calls_that_wait(tmp_path: Path) -> None:
    """Goes red when they keep a worker from being idle, which is then killed."""
    async with busy_sink(tmp_path) as (running, calls):
        ahead = asyncio.ensure_future(running.deliver("ahead"))
        await waits(running)
        pids = running.pids
        await asyncio.wait_for(running.sink.reset(), SECONDS)
        assert await asyncio.gather(*calls, ahead) == [Unavailable("the sink was reset")] * (SLOTS + 1)
        assert await running.deliver("last") == DELIVERED
        assert running.pids == pids
        assert running.notes("received") == ["first", "last"]


async def test_no_more_calls_are_sent_ahead_than_a_worker_makes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when rows in any number wait where no other relay can get them."""
    monkeypatch.setattr(worker_process, "PREFETCH_SECONDS", 60.0)
    monkeypatch.setattr(pool, "WAIT_SECONDS", 0.1)
    async with busy_sink(tmp_path) as (running, calls):
        ahead = [asyncio.ensure_future(running.deliver("ahead")) for _ in range(SLOTS)]
        [process] = running.sink.processes
        await becomes_false(lambda: len(process.calls) < 2 * SLOTS, "they are sent ahead")
        assert await running.deliver("another") == Unavailable(BUSY, behind=True)
        tell(running)
        assert await asyncio.gather(*calls, *ahead) == [DELIVERED] * (2 * SLOTS)


async def test_nothing_is_sent_ahead_while_a_worker_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when calls wait in one worker although another one will take them soon."""
    monkeypatch.setattr(pool, "FIRST_DELAY_SECONDS", 60.0)
    async with python_sink("asynchronous", tmp_path, workers=2) as running:
        await becomes_false(lambda: running.sink.prefetch != 8, "both workers are ready")
        os.kill(running.pids[0], signal.SIGKILL)
        await becomes_false(lambda: len(running.sink.processes) > 1, "one of them is away")
        assert running.sink.prefetch == 0


@pytest.mark.usefixtures("patient")
async def test_workers_together_make_as_many_calls_as_the_sink_says(tmp_path: Path) -> None:
    """Goes red when the shares of the workers are rounded up."""
    async with python_sink("asynchronous", tmp_path, max_in_flight=9, workers=2) as running:
        await becomes_false(lambda: running.sink.prefetch != 9, "both workers are ready")
        calls = [asyncio.ensure_future(running.deliver("wait")) for _ in range(11)]
        await running.noted("steps", 9)
        await becomes_false(lambda: sum(len(p.calls) for p in running.sink.processes) < 11, "all calls are sent")
        tell(running)
        assert await asyncio.wait_for(asyncio.gather(*calls), SECONDS) == [DELIVERED] * 11
        assert running.notes("steps").index("ends") == 9


@pytest.mark.usefixtures("patient")
async def test_no_handler_is_called_in_a_worker_that_will_be_killed(tmp_path: Path) -> None:
    """Goes red when a handler begins in place of one that did not end in time, and is killed with it."""
    async with python_sink("asynchronous", tmp_path, max_in_flight=SLOTS, timeout_seconds=0.5) as running:
        assert await running.deliver("first", again=True) == DELIVERED
        calls = [asyncio.ensure_future(running.deliver("stubborn")) for _ in range(SLOTS)]
        [process] = running.sink.processes
        await becomes_false(lambda: len(process.calls) < SLOTS, "the worker is busy")
        assert await asyncio.wait_for(running.deliver("ahead"), SECONDS) == NOT_TRIED
        assert all(isinstance(verdict, Failed) for verdict in await asyncio.gather(*calls))


async def test_nothing_is_sent_ahead_to_threads(tmp_path: Path) -> None:
    async with python_sink("plain", tmp_path) as running:
        assert await running.deliver("first", again=True) == DELIVERED
        assert running.sink.prefetch == 0
