"""The Python sink without a relay: what handlers do to their events, to each other, and to the leases of a relay."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from pathlib import Path

import pytest

from outbox_relay.domain.lease_clock import CLOCK as LEASE_CLOCK
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Failed, Refused, Unavailable
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.python import pool, worker_process
from outbox_relay.worker.clock import CLOCK
from outbox_relay.worker.threads import Threads
from tests.support.odd_handlers import FAULTS
from tests.support.python_sink import (
    KINDS,
    SECONDS,
    becomes_false,
    is_stopped,
    python_sink,
)
from tests.support.wait import auntil

pytestmark = pytest.mark.processes


def stand_still(seconds: float) -> None:
    """Block the loop of the relay."""
    time.sleep(seconds)


# -- verdicts -----------------------------------------------------------------------------------------------------

MESSAGES = {
    "raise": "ValueError: a b [31m",
    "base": "BaseException: base",
    "exit": "SystemExit: 3",
    "keyboard": "KeyboardInterrupt",
    "cancelled": "CancelledError",
    "cancelled future": "CancelledError",
    "unspeakable": "Unspeakable",
    "surrogates": "ValueError:  é ",
    "named as ours": "DatabaseDown: mine",
    "a group": "BaseExceptionGroup: both (2 sub-exceptions)",
    "printed nowhere": "OSError: closed",
}
"""Answers of the attempts: messages, which may contain the payload. Reasons contain only class and place."""
REASONS = {
    "a task asks": "the handler asked for a retry: busy",
    "retry in an hour": "the handler asked for a retry: busy",
    "bare retry": "the handler asked for a retry",
    "odd retry": "the handler asked for a retry: odd",
    "late retry": "the handler asked for a retry",
    "a coroutine": "the handler returned an awaitable, which has not run: await it in an async function",
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_of_a_handler_costs_its_event_an_attempt_and_its_worker_nothing(
    tmp_path: Path, kind: str
) -> None:
    async with python_sink(kind, tmp_path, max_in_flight=64, threads=64) as running:
        assert await running.deliver("first") == DELIVERED
        pids, names = running.pids, [*FAULTS]
        verdicts = dict(zip(names, await asyncio.gather(*map(running.deliver, names)), strict=True))
        assert await running.deliver("last") == DELIVERED
        assert running.pids == pids
        assert running.ends == []
    assert isinstance(verdicts.pop("bare dead"), Refused)
    assert {name: verdict for name, verdict in verdicts.items() if not isinstance(verdict, Failed)} == {}
    reasons = {name: verdict.reason for name, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert {name: reasons[name] for name in REASONS} == REASONS
    attempts = {name: verdict.attempt for name, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert {name: (attempt := attempts[name]) and attempt.answer for name in MESSAGES} == MESSAGES
    shown = {name: reasons[name].partition(" at ") for name in MESSAGES}
    assert {name: kind for name, (kind, _, _) in shown.items()} == {
        name: message.partition(":")[0] for name, message in MESSAGES.items()
    }
    assert {place.rpartition(":")[0] for _, _, place in shown.values()} == {"support/odd_handlers.py"}
    assert all(len(reason) <= 200 for reason in reasons.values())
    delays = {name: verdict.retry_after_seconds for name, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert {name: delay for name, delay in delays.items() if delay is not None} == {"retry in an hour": 3600.0}
    assert "generator" in reasons["a generator"] + reasons["an asynchronous generator"]
    assert "StopIteration" in str(attempts["no more"])
    assert not (tmp_path / "worked").exists()


async def test_a_handler_that_stops_the_loop_or_loses_its_output_hurts_no_other(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        for what in ("stop the loop", "lose stdout", "fine"):
            assert await running.deliver(what) == DELIVERED
        assert running.ends == []


@pytest.mark.parametrize("kind", KINDS)
async def test_an_event_that_ends_its_worker_is_found_and_its_neighbours_are_not_counted(
    tmp_path: Path, kind: str
) -> None:
    async with python_sink(kind, tmp_path) as running:
        others = [asyncio.ensure_future(running.deliver("nap", again=True)) for _ in range(4)]
        await running.noted("began", 4)
        verdict = await running.deliver("die", again=True)
        assert isinstance(verdict, Failed)
        assert verdict.reason == "its worker ended: it ended with exit status 4"
        assert await asyncio.gather(*others) == [DELIVERED] * 4


async def test_a_handler_that_cannot_be_stopped_is_killed_and_its_neighbours_are_bystanders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "DRAIN_SECONDS", 0.0)
    async with python_sink("plain", tmp_path, timeout_seconds=0.7) as running:
        assert await running.deliver("first") == DELIVERED
        bad = asyncio.ensure_future(running.deliver("sleep"))
        await running.noted("began")
        other = await running.deliver("sleep longer")
        assert isinstance(other, Unavailable)
        assert (other.behind, other.attempt and other.attempt.code) == (True, "bystander")
        verdict = await bad
        assert isinstance(verdict, Failed)
        assert verdict.reason == "the handler did not end in time, and its worker was killed"


async def test_a_cancelled_plain_call_keeps_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its worker would be killed for an unknown reason, and its neighbours would be suspects."""
    monkeypatch.setattr(worker_process, "DRAIN_SECONDS", 0.0)
    async with python_sink("plain", tmp_path, timeout_seconds=0.7) as running:
        assert await running.deliver("first") == DELIVERED
        bad = asyncio.ensure_future(running.deliver("sleep"))
        await running.noted("began")
        bad.cancel()
        other = await running.deliver("sleep longer")
        assert isinstance(other, Unavailable)
        assert other.attempt is not None
        assert other.attempt.code == "bystander"


async def test_an_asynchronous_handler_that_does_not_end_is_cancelled_or_killed(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path, timeout_seconds=0.3) as running:
        assert await running.deliver("first") == DELIVERED
        verdicts = await asyncio.gather(running.deliver("sleep"), running.deliver("stubborn"))
        assert [getattr(verdict, "reason", "") for verdict in verdicts] == [
            "the handler did not end in time",
            "the handler did not end in time, and its worker was killed",
        ]


async def test_a_handler_that_blocks_the_loop_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LATE_SECONDS", 0.3)
    async with python_sink("asynchronous", tmp_path, timeout_seconds=0.2) as running:
        assert await running.deliver("first") == DELIVERED
        verdict = await running.deliver("block", again=True)
        assert isinstance(verdict, Failed)
        assert "it no longer answers" in verdict.reason


async def test_a_handler_that_eats_memory_is_found(tmp_path: Path) -> None:
    async with python_sink("plain", tmp_path, memory_mb=80) as running:
        assert await running.deliver("first") == DELIVERED
        verdict = await running.deliver("eat", again=True)
        assert isinstance(verdict, Failed)
        assert "MB, more than max_memory_mb" in verdict.reason


@pytest.mark.parametrize("kind", KINDS)
async def test_an_extended_call_outlasts_the_limit_and_its_deadline_never_goes_back(tmp_path: Path, kind: str) -> None:
    async with python_sink(kind, tmp_path, timeout_seconds=0.4) as running:
        assert await running.deliver("first") == DELIVERED
        delivered = asyncio.ensure_future(running.deliver("extend"))

        async def is_extended() -> bool:
            return any(end > lease_clock() + 50 for end in running.sink.deadlines().values())

        await auntil(is_extended, seconds=SECONDS, what="the relay knows the new end")
        assert await delivered == DELIVERED


async def test_calls_that_end_before_their_task_begins_are_answered(tmp_path: Path) -> None:
    """A call and its cancellation may come in one piece. A worker that did not answer would be killed for it."""
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("first") == DELIVERED
        [process], [pid] = running.sink.processes, running.pids
        os.kill(pid, signal.SIGSTOP)
        await becomes_false(lambda: not is_stopped(pid), "the process is stopped")
        now = lease_clock()
        values = (an_event().uid, "a", None, "text/plain", None, "2026-01-01T00:00:00+00:00", None, 1, None)
        calls = [process.begin(n, values, b"sleep", now + 60, now + 60, 60) for n in range(3)]
        for call in calls:
            process.cancel(call)
        await asyncio.sleep(0)  # both are sent
        os.kill(pid, signal.SIGCONT)
        answers = await asyncio.wait_for(asyncio.gather(*(call.answer for call in calls)), 5)
        assert [answer.outcome for answer in answers] == ["timeout"] * 3
        assert running.notes("began") == []
        assert await running.deliver("last") == DELIVERED
        assert running.ends == []


async def test_values_of_context_variables_do_not_pass_from_event_to_event(tmp_path: Path) -> None:
    async with python_sink("plain", tmp_path, threads=1) as running:
        assert [await running.deliver("context") for _ in range(3)] == [DELIVERED] * 3


def test_a_process_that_can_start_no_thread_uses_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, done, go_on = Threads(4), queue.SimpleQueue[int](), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            threads.run(lambda: done.put(0))

    def wait() -> None:
        go_on.wait(SECONDS)
        done.put(1)

    threads.run(wait)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        threads.run(lambda: done.put(2))
    go_on.set()
    assert [done.get(timeout=SECONDS) for _ in range(2)] == [1, 2]
    for number in range(3, 9):
        threads.run(lambda number=number: done.put(number))
    assert sorted(done.get(timeout=SECONDS) for _ in range(6)) == [*range(3, 9)]


# -- fences -------------------------------------------------------------------------------------------------------


async def test_a_call_that_its_worker_reads_too_late_is_not_made(tmp_path: Path) -> None:
    """The lease of the shard may have ended, and another relay may have delivered the event."""
    assert CLOCK == LEASE_CLOCK
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("first") == DELIVERED
        blocks = asyncio.ensure_future(running.deliver("block a while"))
        await asyncio.sleep(0)  # it is sent before the other
        late = await running.deliver("late", seconds=0.3)
        assert isinstance(late, Unavailable)
        assert await blocks == DELIVERED
        assert await running.deliver("last") == DELIVERED
        assert running.notes("received") == ["first", "last"]


async def test_a_worker_that_reads_nothing_gets_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path, max_in_flight=64) as running:
        assert await running.deliver("first") == DELIVERED
        [process] = running.sink.processes
        blocks = asyncio.ensure_future(running.deliver("block a while"))
        await asyncio.sleep(0)
        large = [asyncio.ensure_future(running.deliver("x" * (1 << 20))) for _ in range(20)]
        await asyncio.sleep(0)
        assert len(process.calls) < 6
        assert await asyncio.gather(blocks, *large) == [DELIVERED] * 21


async def test_a_worker_is_not_blamed_for_a_machine_that_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(worker_process, "DRAIN_SECONDS", 0.0)
    async with python_sink("asynchronous", tmp_path, timeout_seconds=0.6) as running:
        assert await running.deliver("first") == DELIVERED
        nap = asyncio.ensure_future(running.deliver("nap"))
        await running.noted("began")
        [pid] = running.pids
        os.kill(pid, signal.SIGSTOP)
        stand_still(1.5)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(await nap, Delivered | Failed)
        assert await running.deliver("last") == DELIVERED
        assert running.ends == []


async def test_a_reset_makes_no_suspects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.sinks.python.sink.RESET_SECONDS", 0.1)
    async with python_sink("plain", tmp_path) as running:
        event = an_event(None, b"sleep")
        under_way = asyncio.ensure_future(running.sink.deliver([event], lease_clock() + 60))
        await running.noted("began")
        await running.sink.reset()
        assert await under_way == [Unavailable("the sink was reset")]
        again = asyncio.ensure_future(running.sink.deliver([event], lease_clock() + 60))
        await running.noted("began", 2)
        assert len(running.sink.processes) == 1
        again.cancel()


async def test_calls_that_wait_for_a_busy_worker_say_nothing_about_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WAIT_SECONDS", 0.1)
    async with python_sink("plain", tmp_path, threads=1) as running:
        first = await running.deliver("first", again=True)
        naps = asyncio.ensure_future(running.deliver("nap"))
        await running.noted("began")
        assert await running.deliver("other") == Unavailable("every worker is busy", behind=True)
        assert [first, await naps] == [DELIVERED] * 2


async def test_calls_wait_in_their_order_and_none_is_forgotten(tmp_path: Path) -> None:
    async with python_sink("plain", tmp_path, threads=2, max_in_flight=200) as running:
        calls = [asyncio.ensure_future(running.deliver(str(number))) for number in range(200)]
        await asyncio.sleep(0)
        for call in calls[::7]:
            call.cancel()
        verdicts = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SECONDS)
        assert [v for n, v in enumerate(verdicts) if n % 7] == [DELIVERED] * (200 - len(calls[::7]))
        received = [int(line) for line in running.notes("received")]
        assert sorted(received, key=lambda n: (n // 4, n)) == sorted(received)
        assert await running.deliver("last") == DELIVERED
