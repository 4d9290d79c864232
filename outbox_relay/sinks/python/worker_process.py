"""One worker process: started, given calls over a pipe, watched, and killed when it does not end a call in time.

The memory is compared with the resident pages and not limited by ``RLIMIT_AS``: address space that threads and
libraries reserve is many times the memory that they use, so that any limit of it which stops a leak refuses threads.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.python.output import OutputReader, Report
from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import MOST_ANSWER, BadFrame, Frame, FrameReader, encode

START_SECONDS = 60.0
"""Time limit of the import of a handler."""
WATCH_SECONDS = 0.2
"""Interval between two looks at the time limits and the memory of a worker."""
LATE_SECONDS = 1.5
"""Time after the end of a call after which its worker is killed if it has not answered."""
DRAIN_SECONDS = 0.5
"""Time for the other calls of a worker that is to be killed."""
WRITE_SECONDS = 5.0
"""Maximum wait for a worker that does not read."""
CHECK_SECONDS = 15.0
OUTCOMES = frozenset(("done", "retry", "dead", "timeout", "unavailable", "failed"))


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The task of a worker. ``threads`` bounds the calls of a plain handler, and ``memory_mb`` is None for no limit."""

    handler: str
    consumer: str
    threads: int
    dsn: str = field(default="", repr=False)
    memory_mb: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


class CallOutcome(NamedTuple):
    """The outcome of a call.

    Besides those of a worker: ``unsent``; ``stuck``, a call that did not end and was killed with its worker;
    ``bystander``, one that was killed with it; ``died``, one whose worker ended for a reason that is not known.
    """

    outcome: str
    reason: str = ""
    after: float | None = None


@dataclass(slots=True, eq=False)
class Call:
    """A call under way. ``ends_at`` is a ``lease_clock()`` value."""

    ends_at: float
    answer: asyncio.Future[CallOutcome]
    extended: bool = False
    stuck: bool = False


class WorkerProcess:
    """A process from its start to its end. ``run`` serves until then; ``ready`` is set once it accepts calls."""

    def __init__(self, task: WorkerTask, report: Report) -> None:
        self._task = task
        self._report = report
        self.ready = asyncio.Event()
        self.problem: str | None = None
        """The reason why the handler cannot be called."""
        self.is_async = True
        self.calls: dict[int, Call] = {}
        self.served = False
        """True once a call was answered."""
        self._number = 0
        self._ended = asyncio.Event()
        self._finished = asyncio.Event()
        self._end_reason = ""
        self._condemned_at: float | None = None
        self._checked: asyncio.Future[str | None] | None = None
        self._channel = Channel(self._receive, self._ended.set, FrameReader(MOST_ANSWER, 0))
        self._process: Process | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def accepts(self) -> bool:
        """True while calls may be begun."""
        return self.ready.is_set() and self._condemned_at is None and not self._ended.is_set()

    @property
    def pid(self) -> int | None:
        """The id of the process, or None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def end_reason(self) -> str:
        """The reason for which the process ended."""
        return self._end_reason

    # -- its life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the process and serve until it has ended. Its calls have answers then."""
        began = lease_clock()
        try:
            await self._start()
            while not self._ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS):
                        await self._ended.wait()
                self._watch(began)
        except OSError as error:
            self.problem = f"no worker process can be started: {error.strerror}"
        finally:
            await self._end()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "outbox_relay.worker", str(theirs.fileno()), str(os.getpid())),
                stdin=DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=(theirs.fileno(),),
                env=dict(self._task.environment),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: OutputReader(self._report), os.fdopen(read, "rb", 0))
        ours.setblocking(False)
        await loop.create_connection(lambda: self._channel, sock=ours)
        task = {"handler": self._task.handler, "consumer": self._task.consumer, "threads": self._task.threads}
        self._channel.send(encode("start", {**task, "dsn": self._task.dsn}))

    def _watch(self, began: float) -> None:
        now = lease_clock()
        if not self.ready.is_set() and now - began > START_SECONDS:
            self.problem = f"handler {self._task.handler}: its import has not ended within {START_SECONDS:g} s"
            self._ended.set()
        if self._condemned_at is None and (reason := self._fault(now)):
            self._condemn(now, reason)
        if self._condemned_at is not None:
            left = any(not call.stuck for call in self.calls.values())
            if not left or now - self._condemned_at >= DRAIN_SECONDS:
                self._ended.set()

    def _fault(self, now: float) -> str:
        if any(now - call.ends_at > LATE_SECONDS for call in self.calls.values()):
            return "it no longer answers: a handler blocks the event loop or holds the interpreter"
        limit, used = self._task.memory_mb, self._memory_mb()
        return f"it used {used} MB, more than max_memory_mb" if limit is not None and used > limit else ""

    def _memory_mb(self) -> int:
        """Return the resident memory of the process, in MB; 0 if the system does not tell."""
        if self._process is None or self._task.memory_mb is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * resource.getpagesize() >> 20

    def _condemn(self, now: float, reason: str) -> None:
        """Begin no call any more, and kill the process soon."""
        self._condemned_at, self._end_reason = now, reason

    async def _end(self) -> None:
        """Kill the process with its group, wait until it is gone, and answer its calls."""
        self._ended.set()
        self._channel.close()
        if self._process is not None:
            await asyncio.shield(asyncio.ensure_future(self._killed(self._process)))
        reason = self._end_reason = self._end_reason or _exit_text(self._process)
        if not self.ready.is_set() and self.problem is None:
            self.problem = f"handler {self._task.handler}: the worker ended during its import: {reason}"
        is_known = any(call.stuck for call in self.calls.values())
        for call in self.calls.values():
            outcome = "stuck" if call.stuck else "bystander" if is_known else "died"
            if not call.answer.done():
                call.answer.set_result(CallOutcome(outcome, reason))
        self.calls.clear()
        self._idle.set()
        self._finished.set()

    async def _killed(self, process: Process) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    # -- calls ------------------------------------------------------------------------------------------------

    async def call(
        self, frame_values: tuple[str | int | float | None, ...], body: bytes, limits: Limits
    ) -> CallOutcome:
        """Call the handler, and return the outcome. Nothing is sent from ``limits.until`` on."""
        if not self._channel.writable.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._channel.writable.wait()
        if not self.accepts or not self._channel.writable.is_set() or lease_clock() >= limits.until:
            return CallOutcome("unsent", "not delivered in time")
        self._number = number = self._number + 1
        call = Call(lease_clock() + limits.seconds, asyncio.get_running_loop().create_future())
        try:
            frame = encode("deliver", number, *frame_values, limits.seconds, limits.replay, body=body)
        except BadFrame as error:
            return CallOutcome("dead", str(error))
        self.calls[number] = call
        self._idle.clear()
        limits.began(call)
        self._channel.send(frame)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._channel.send(encode("cancel", number))
            raise

    async def check(self) -> str | None:
        """Return why the handler's database cannot be used, or None."""
        self._checked = asyncio.get_running_loop().create_future()
        self._channel.send(encode("check"))
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await self._checked
        except TimeoutError:
            return f"dsn: no answer of the handler's database within {CHECK_SECONDS:g} s"

    async def cancel_all(self, seconds: float) -> None:
        """End every call, with the process if one of them has not ended within ``seconds``."""
        for number in self.calls:
            self._channel.send(encode("cancel", number))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        if self.calls:
            self._end_reason = "the sink was reset"
            self._ended.set()
            await self._finished.wait()

    def _receive(self, frame: Frame) -> None:
        match frame:
            case ("ready", ["async" | "plain" as kind], _):
                self.is_async = kind == "async"
                self.ready.set()
            case ("unusable", [str(reason)], _) if not self.ready.is_set():
                self.problem = reason
            case ("answer", [int(number), str(outcome), str(reason), float() | int() | None as after], _):
                self._answered(number, outcome, reason, after)
            case ("extend", [int(number), float(seconds)], _):
                if (call := self.calls.get(number)) is not None:
                    call.ends_at = max(call.ends_at, lease_clock() + min(seconds, 86_400.0))
                    call.extended = True
            case ("stuck", [int(number)], _):
                if (call := self.calls.get(number)) is not None:
                    call.stuck = True
                    self._condemn(lease_clock(), "another call did not end in time")
            case ("checked", [str() | None as found], _) if self._checked is not None and not self._checked.done():
                self._checked.set_result(found)
            case _:
                raise BadFrame("a frame of an unknown kind")

    def _answered(self, number: int, outcome: str, reason: str, after: float | None) -> None:
        if outcome not in OUTCOMES or not 0 < number <= self._number:
            raise BadFrame(outcome)
        call = self.calls.pop(number, None)
        if call is None:
            return
        self.served = True
        if not self.calls:
            self._idle.set()
        if not call.answer.done():
            call.answer.set_result(CallOutcome(outcome, reason, after))


class Limits(NamedTuple):
    """The limits of a call: nothing is sent from ``until`` on, and ``seconds`` are its time. See ``Delivery``."""

    until: float
    seconds: float
    replay: int | None
    began: CallBegan


class CallBegan:
    """Records the call that was begun."""

    call: Call | None = None

    def __call__(self, call: Call) -> None:
        """Take the call."""
        self.call = call


def _exit_text(process: Process | None) -> str:
    code = None if process is None else process.returncode
    if code is None:
        return "it was not started"
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit status {code}"
