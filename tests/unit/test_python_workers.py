"""The workers of a Python sink: their processes and ends, their supervision, and floods of what they send."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable
from outbox_relay.domain.retry import RetryPolicy, requested_delay
from outbox_relay.sinks.python import child, output, worker_process
from outbox_relay.sinks.python.child import ChildProcess
from outbox_relay.sinks.python.output import OutputReader
from outbox_relay.sinks.python.worker_process import WorkerProcess
from outbox_relay.worker.frames import BadFrame, Frame
from tests.support.python_sink import (
    KINDS,
    SECONDS,
    becomes_false,
    children_that_ended,
    descriptors_open,
    ignore,
    is_alive,
    is_stopped,
    oom_score,
    python_sink,
)
from tests.support.wait import auntil

pytestmark = pytest.mark.processes

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def printing_without_end() -> Generator[int]:
    read, write = os.pipe()
    with subprocess.Popen(["yes", ""], stdout=write) as program:  # noqa: S607
        os.close(write)
        yield read
        program.kill()


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
        process._receive(Frame("answer", [[2, "retry", "", 10**400, ""]], b""))  # pyright: ignore[reportPrivateUsage]
        verdict = await sleeps
        assert isinstance(verdict, Failed)
        assert requested_delay(verdict.retry_after_seconds, RetryPolicy(), 1.0) < 1e9
        for bad in ([2, "retry", "", "soon", ""], [99, "retry", "", None, ""], [2, "invented", "", None, ""], 5):
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
