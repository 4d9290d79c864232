"""The Python sink without a relay: what handlers do to their worker, to each other, and to the process of the relay."""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.lease_clock import CLOCK as LEASE_CLOCK
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Failed, Refused, Unavailable
from outbox_relay.domain.retry import RetryPolicy, requested_delay
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.python import child, output, pool, worker_process
from outbox_relay.sinks.python.child import ChildProcess
from outbox_relay.sinks.python.output import OutputReader
from outbox_relay.sinks.python.worker_process import WorkerProcess
from outbox_relay.worker.clock import CLOCK
from outbox_relay.worker.frames import BadFrame, Frame
from outbox_relay.worker.threads import Threads
from tests.support.odd_handlers import FAULTS
from tests.support.python_sink import children_that_ended, is_alive, python_sink
from tests.support.wait import auntil

KINDS = ("asynchronous", "plain")
PR_SET_CHILD_SUBREAPER = 36
SECONDS = 30.0


async def becomes_false(fact: Any, what: str) -> None:
    async def is_false() -> bool:
        return not fact()

    await auntil(is_false, seconds=SECONDS, what=what)


def ignore(_first: object, _second: object, /) -> None:
    """Do nothing."""


@contextmanager
def printing_without_end() -> Generator[int]:
    read, write = os.pipe()
    with subprocess.Popen(["yes", ""], stdout=write) as program:  # noqa: S607
        os.close(write)
        yield read
        program.kill()


def stand_still(seconds: float) -> None:
    """Block the loop of the relay."""
    time.sleep(seconds)


def descriptors_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_stopped(pid: int) -> bool:
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


# -- verdicts -----------------------------------------------------------------------------------------------------

REASONS = {
    "raise": "ValueError: a b [31m",
    "base": "BaseException: base",
    "exit": "SystemExit: 3",
    "keyboard": "KeyboardInterrupt",
    "cancelled": "CancelledError",
    "cancelled future": "CancelledError",
    "unspeakable": "Unspeakable",
    "surrogates": "ValueError:  é ",
    "named as ours": "DatabaseDown: mine",
    "bare retry": "the handler asked for a retry",
    "odd retry": "the handler asked for a retry: odd",
    "late retry": "the handler asked for a retry",
    "a coroutine": "TypeError: the handler returned an awaitable, which has not run: await it in an async function",
    "a group": "BaseExceptionGroup: both (2 sub-exceptions)",
    "printed nowhere": "OSError: closed",
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
    assert all(len(reason) <= 200 for reason in reasons.values())
    assert "generator" in reasons["a generator"] + reasons["an asynchronous generator"]
    assert "StopIteration" in reasons["no more"]
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
        values = (an_event().uid, "a", None, "text/plain", None, "2026-01-01T00:00:00+00:00", None, 1)
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


# -- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["fork and die", "start a program and die"])
async def test_the_end_of_a_worker_is_noticed_although_another_process_holds_its_pipe(
    tmp_path: Path, what: str
) -> None:
    descriptors = descriptors_open()
    async with python_sink("asynchronous", tmp_path, timeout_seconds=60.0) as running:
        verdict = await asyncio.wait_for(running.deliver(what, again=True), SECONDS)
        assert isinstance(verdict, Failed)
        assert verdict.reason == "its worker ended: it ended with exit status 4"
        assert await running.deliver("fine") == DELIVERED
    await becomes_false(lambda: descriptors_open() > descriptors, "no descriptor is left")


async def test_a_number_that_only_a_broken_worker_sends_ends_no_session(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("first") == DELIVERED
        sleeps = asyncio.ensure_future(running.deliver("sleep"))
        await running.noted("began")
        [process] = running.sink.processes
        process._receive(Frame("answer", [[2, "retry", "", 10**400]], b""))  # pyright: ignore[reportPrivateUsage]
        verdict = await sleeps
        assert isinstance(verdict, Failed)
        assert requested_delay(verdict.retry_after_seconds, RetryPolicy(), 1.0) < 1e9
        for bad in ([2, "retry", "", "soon"], [99, "retry", "", None], [2, "invented", "", None], 5):
            with pytest.raises(BadFrame):
                process._receive(Frame("answer", [bad], b""))  # pyright: ignore[reportPrivateUsage]


async def test_a_forked_process_that_returns_answers_nothing_and_ends(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("fork and return") == DELIVERED
        [child_pid] = map(int, await running.noted("child"))
        await becomes_false(lambda: is_alive(child_pid), "the forked process has ended")
        assert await asyncio.gather(*(running.deliver(str(n)) for n in range(8))) == [DELIVERED] * 8
        assert sorted(running.notes("received")) == [str(n) for n in range(8)]
        assert running.ends == []


@pytest.mark.parametrize("kind", KINDS)
async def test_signals_for_the_relay_end_no_handler_but_programs_that_it_starts(tmp_path: Path, kind: str) -> None:
    async with python_sink(kind, tmp_path) as running:
        naps = asyncio.ensure_future(running.deliver("nap"))
        await running.noted("began")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(running.pids[0], number)
        assert await naps == DELIVERED
        assert await running.deliver("stop a program") == DELIVERED
        assert running.ends == []


async def test_the_kernel_prefers_workers_when_memory_runs_out(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("first") == DELIVERED
        [pid] = running.pids
        assert oom_score(pid) >= min(1000, oom_score(os.getpid()) + 500)


async def test_no_zombie_is_left_where_the_relay_is_process_1(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        async with python_sink("asynchronous", tmp_path) as running:
            assert await running.deliver("start a program") == DELIVERED
            [orphan] = map(int, running.notes("orphan"))
            pids = running.pids
        await becomes_false(lambda: Path(f"/proc/{orphan}").exists(), "the program was killed, and waited for")
        assert set(children_that_ended()).isdisjoint([orphan, *pids])
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


async def test_a_group_is_not_killed_once_its_id_may_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        assert await running.deliver("first") == DELIVERED
        [process] = running.sink.processes
        found = process._child  # pyright: ignore[reportPrivateUsage]
        assert found is not None
        await running.sink.close()
        killed: list[int] = []

        def note(group: int, _number: int) -> None:
            killed.append(group)

        monkeypatch.setattr(os, "killpg", note)
        found.kill()
        assert await found.reap(1)
        assert killed == []


async def test_a_process_that_the_system_does_not_end_delays_a_close_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "GONE_SECONDS", 0.2)
    async with python_sink("asynchronous", tmp_path) as running:
        sleeps = asyncio.ensure_future(running.deliver("sleep"))
        await running.noted("began")
        [pid] = running.pids
        with monkeypatch.context() as patch:
            patch.setattr(child.os, "killpg", ignore)
            os.kill(pid, signal.SIGSTOP)
            await becomes_false(lambda: not is_stopped(pid), "the process is stopped")
            await asyncio.wait_for(running.sink.close(), 5)
        verdict = await sleeps
        assert isinstance(verdict, Unavailable)
        os.kill(pid, signal.SIGKILL)
        await becomes_false(lambda: Path(f"/proc/{pid}").exists(), "the process is gone, and was waited for")


async def test_calls_are_answered_although_the_end_of_their_worker_is_cancelled(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        sleeps = asyncio.ensure_future(running.deliver("sleep"))
        await running.noted("began")
        keepers = running.sink._pool._keepers  # pyright: ignore[reportPrivateUsage]
        for _ in range(5):  # the first cancellation begins the end, and the others meet it
            for keeper in keepers:
                keeper.cancel()
            await asyncio.sleep(0)
        assert isinstance(await asyncio.wait_for(sleeps, 5), Unavailable)


# -- the pool -----------------------------------------------------------------------------------------------------


async def test_a_pool_that_is_closed_and_opened_at_once_has_its_workers(tmp_path: Path) -> None:
    async with python_sink("asynchronous", tmp_path) as running:
        workers = running.sink._pool  # pyright: ignore[reportPrivateUsage]
        for _ in range(3):
            assert await running.deliver("fine", again=True) == DELIVERED
            await asyncio.gather(workers.close(), workers.open())
            assert len(workers.processes) <= 1
        assert await running.deliver("last", again=True) == DELIVERED
        assert len(running.pids) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError(24, "Too many open files")])
async def test_a_worker_that_cannot_be_started_is_tried_again_and_its_sink_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ChildProcess, "start", fail)
        async with python_sink("asynchronous", tmp_path) as running:
            verdict = await running.deliver("first")
            assert isinstance(verdict, Unavailable)
            assert verdict.reason.startswith("no worker process can be started: ")
            assert running.sink.fault == running.sink.trouble == verdict.reason
            patch.undo()
            assert await running.deliver("first", again=True) == DELIVERED
            assert running.sink.fault is None


async def test_no_error_ends_the_supervision_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: WorkerProcess) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "run", fail)
        async with python_sink("asynchronous", tmp_path) as running:
            running.ends = None  # type: ignore[assignment] - the report of an end fails too
            verdict = await running.deliver("first")
            assert verdict == Unavailable("no worker process can be started: ZeroDivisionError")
            patch.undo()
            assert await running.deliver("first", again=True) == DELIVERED


FAULTY_WORKERS: dict[str, tuple[dict[str, Any], str]] = {
    "ends": ({"environment": {"HANDLERS_END": "1"}}, "the worker ended before its first call"),
    "is large": ({"memory_mb": 5}, "MB, more than max_memory_mb"),
}


@pytest.mark.parametrize("what", FAULTY_WORKERS)
async def test_a_worker_that_ends_before_its_first_call_is_a_fault(tmp_path: Path, what: str) -> None:
    options, sentence = FAULTY_WORKERS[what]
    async with python_sink("asynchronous", tmp_path, **options) as running:

        async def fault() -> str | None:
            return running.sink.fault

        assert sentence in str(await auntil(fault, seconds=SECONDS, what="the sink has a fault"))


async def test_a_connection_string_that_is_none_is_a_fault_without_its_password(tmp_path: Path) -> None:
    async with python_sink("transactional", tmp_path, dsn="postgresql://shop:pa55word@[localhost/shop") as running:
        assert await running.deliver("first") == Unavailable("dsn is not a connection string of PostgreSQL")


async def test_a_worker_of_another_version_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "__version__", "0.0.9")
    async with python_sink("asynchronous", tmp_path) as running:
        verdict = await running.deliver("first")
        assert isinstance(verdict, Unavailable)
        assert "the relay has version 0.0.9" in verdict.reason
        assert "restart the relay" in verdict.reason


# -- floods -------------------------------------------------------------------------------------------------------


async def test_a_handler_that_prints_without_end_takes_a_limited_part_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, take = [0], OutputReader._take  # pyright: ignore[reportPrivateUsage]

    def count(self: OutputReader, data: bytes) -> None:
        taken[0] += len(data)
        take(self, data)

    monkeypatch.setattr(OutputReader, "_take", count)
    with printing_without_end() as read:
        reader, began = OutputReader(read, ignore), time.monotonic()

        async def is_over() -> bool:
            return time.monotonic() - began > 4 * output.PAUSE_SECONDS

        await auntil(is_over, seconds=SECONDS, what="some pauses are over")
        most = (time.monotonic() - began) / output.PAUSE_SECONDS + 1
        assert taken[0] <= most * (output.MOST_BYTES + output.READ_BYTES)
        reader.close()


async def test_lines_beyond_the_rate_are_counted_and_long_ones_cut(tmp_path: Path) -> None:
    async with python_sink("plain", tmp_path) as running:
        assert await running.deliver("print a lot") == DELIVERED
    assert len(running.printed) <= output.MOST_LINES + 1
    assert all(len(line) <= output.MOST_CHARS for line in running.printed)


async def test_a_handler_that_extends_without_end_sends_a_limited_number_of_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[str] = []
    receive = WorkerProcess._receive_other  # pyright: ignore[reportPrivateUsage]

    def count(self: WorkerProcess, kind: str, value: object) -> None:
        received.append(kind)
        receive(self, kind, value)

    monkeypatch.setattr(WorkerProcess, "_receive_other", count)
    async with python_sink("plain", tmp_path) as running:
        assert await running.deliver("extend often") == DELIVERED
    assert 1 <= received.count("extend") <= 15
