"""One worker process: started, given calls over a pipe, watched, and killed when it does not end a call in time.

The memory is compared with the resident pages and not limited by ``RLIMIT_AS``: address space that threads and
libraries reserve is many times the memory that they use, so that any limit of it which stops a leak refuses threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outbox_relay import __version__
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.python.child import ChildProcess
from outbox_relay.sinks.python.output import OutputReader, Report
from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import MOST_ANSWER, BadFrame, Frame, FrameReader, item

START_SECONDS = 60.0
"""Time limit of the import of a handler."""
WATCH_SECONDS = 0.2
"""Interval between two looks at the time limits and the memory of a worker."""
LATE_SECONDS = 1.5
"""Time after the end of a call after which its worker is killed if it has not answered."""
DRAIN_SECONDS = 0.5
"""Time for the other calls of a worker that is to be killed, and for what a worker that ended has sent."""
GONE_SECONDS = 5.0
"""Maximum wait for a killed process. One that the system does not end runs nothing of its own any more."""
CHECK_SECONDS = 15.0
PREFETCH_SECONDS = 0.25
"""Maximum wait of a call in a worker for others to end, after which its row goes back."""
MOST_EXTENSION_SECONDS = 86_400.0
"""Maximum of ``extend``, which a worker that is out of its mind may exceed."""
OUTCOMES = frozenset(("retry", "dead", "timeout", "unavailable", "failed", "unsent"))


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The task of a worker. ``threads`` bounds the calls of a plain handler, and ``memory_mb`` is None for no limit.

    ``replay`` is the number of the replay that it serves, or None.
    """

    handler: str
    consumer: str
    threads: int
    dsn: str = field(default="", repr=False)
    memory_mb: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    replay: int | None = None


class CallOutcome(NamedTuple):
    """The outcome of a call.

    Besides those of a worker: ``stuck``, a call that did not end and was killed with its worker; ``bystander``, one
    that was killed with it; ``reset``, one that a reset ended; ``died``, one whose worker ended for a reason that is
    not known.
    """

    outcome: str
    reason: str = ""
    after: float | None = None
    message: str = ""


DONE = CallOutcome("done")
WAITED = CallOutcome("waited")
"""The outcome of a call that was sent ahead, and before which too few others ended."""
DATABASE_SILENT = "dsn: the handler's database did not answer in time"


@dataclass(slots=True, eq=False)
class Call:
    """A call under way. Times are values of ``lease_clock()``.

    The lease of the event's row covers ``planned``. ``stuck`` is the outcome of a call that did not end in time.
    """

    number: int
    event: int
    planned: float
    ends_at: float
    answer: asyncio.Future[CallOutcome]
    waits: bool = False
    """True if the worker made as many calls as it can when this one was sent."""
    stuck: str = ""


class WorkerProcess:
    """A process from its start to its end, which ``run`` awaits. ``wake`` is called when it can take more calls.

    It makes ``share`` calls at once. More of them wait there, each for ``PREFETCH_SECONDS`` at most.
    """

    def __init__(self, task: WorkerTask, share: int, report: Report, wake: Callable[[int], None]) -> None:
        self._task = task
        self.share = share
        self._report = report
        self._wake = wake
        self.ready = False
        self.problem: str | None = None
        """The reason why the handler cannot be called."""
        self.is_async = True
        self.calls: dict[int, Call] = {}
        self.served = False
        """True once a call was answered."""
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._finished = asyncio.Event()
        self._end_reason = ""
        self._condemned_at: float | None = None
        self._is_reset = False
        self._looked_at = self._patient_until = 0.0
        self._checked: asyncio.Future[str | None] | None = None
        self._channel = Channel(self._receive, self._end_soon, FrameReader(MOST_ANSWER, 0), self._resume)
        self._child: ChildProcess | None = None
        self._output: OutputReader | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def accepts(self) -> bool:
        """True while calls may be begun."""
        return self.ready and self._condemned_at is None and self._channel.writable and not self._ended.is_set()

    @property
    def pid(self) -> int | None:
        """The id of the process, or None before it is started."""
        return None if self._child is None else self._child.pid

    @property
    def end_reason(self) -> str:
        """The reason for which the process ended."""
        return self._end_reason

    # -- its life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the process and serve until it has ended. Its calls have answers then, whatever happens."""
        began = self._looked_at = lease_clock()
        try:
            await self._start()
            while not self._ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS):
                        await self._ended.wait()
                self._watch(began)
        except OSError as error:
            self.problem = f"no worker process can be started: {error.strerror or type(error).__name__}"
        except Exception as error:  # such as no thread for its supervision
            self.problem = f"no worker process can be started: {type(error).__name__}"
        finally:
            await self._end()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._spawn(theirs.fileno())
            ours.setblocking(False)
            await self._loop.create_connection(lambda: self._channel, sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        task = {name: getattr(self._task, name) for name in ("handler", "consumer", "threads", "dsn", "replay")}
        bounds = {"share": self.share, "patience": PREFETCH_SECONDS}
        self._channel.send("start", json.dumps({**task, **bounds, "version": __version__}).encode())

    def _spawn(self, pipe: int) -> None:
        read, write = os.pipe()
        try:
            command = (sys.executable, "-m", "outbox_relay.worker", str(pipe), str(os.getpid()))
            self._child = ChildProcess.start(command, self._task.environment, pipe, write, self._exited)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._output = OutputReader(read, self._report)

    def _exited(self) -> None:
        """End soon after the process: what it has sent is read before, and its end of the pipe may have been copied."""
        self._loop.call_later(DRAIN_SECONDS, self._end_soon)

    def _end_soon(self) -> None:
        self._ended.set()

    def _resume(self) -> None:
        self._wake(len(self.calls) + 1)

    def _watch(self, began: float) -> None:
        now = lease_clock()
        if now - self._looked_at > LATE_SECONDS:  # the machine was suspended, or too busy
            self._patient_until = now + LATE_SECONDS
        self._looked_at = now
        if not self.ready and now - began > START_SECONDS:
            self.problem = f"handler {self._task.handler}: its import has not ended within {START_SECONDS:g} s"
            self._ended.set()
        if self._condemned_at is None and now >= self._patient_until and (reason := self._fault(now)):
            self._condemn(now, reason)
        if self._condemned_at is not None:
            left = any(not call.stuck for call in self.calls.values())
            if not left or now - self._condemned_at >= DRAIN_SECONDS:
                self._ended.set()

    def _fault(self, now: float) -> str:
        if any(now - call.ends_at > LATE_SECONDS for call in self.calls.values()):
            return "it no longer answers: a handler blocks the event loop or holds the interpreter"
        limit, used = self._task.memory_mb, self._memory_mb()
        if limit is None or used <= limit:
            return ""
        reason = f"it used {used} MB, more than max_memory_mb"
        if self.ready and not self.served and not self.calls:
            self.problem = f"handler {self._task.handler}: {reason}, before its first call"
        return reason

    def _memory_mb(self) -> int:
        """Return the resident memory of the process, in MB; 0 if the system does not tell."""
        if self._child is None or self._task.memory_mb is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self._child.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return 0
        return pages * resource.getpagesize() >> 20

    def _condemn(self, now: float, reason: str) -> None:
        """Begin no call any more, and kill the process soon."""
        if self._condemned_at is None:
            self._condemned_at, self._end_reason = now, reason

    async def _end(self) -> None:
        """Kill the process with its group, wait until it is gone, and answer its calls."""
        self._ended.set()
        self._channel.close()
        try:
            if self._child is not None:
                await self._child.reap(GONE_SECONDS)
        finally:
            if self._output is not None:
                self._output.close()
            text = "it was not started" if self._child is None else self._child.exit_text
            self._end_reason = self._end_reason or text
            if self.problem is None and not self.served and not self.calls and not self._is_reset:
                when = "before its first call" if self.ready else "during its import"
                self.problem = f"handler {self._task.handler}: the worker ended {when}: {self._end_reason}"
            self._answer_calls()
            self._finished.set()

    def _answer_calls(self) -> None:
        is_known = any(call.stuck for call in self.calls.values())
        rest = "reset" if self._is_reset else "bystander" if is_known else "died"
        for call in self.calls.values():
            if not call.answer.done():
                reason = DATABASE_SILENT if call.stuck == "unavailable" else self._end_reason
                call.answer.set_result(CallOutcome(call.stuck or rest, reason))
        self.calls.clear()
        self._idle.set()

    # -- calls ------------------------------------------------------------------------------------------------

    def begin(
        self, event: int, values: Sequence[str | int | None], body: bytes, until: float, planned: float, seconds: float
    ) -> Call:
        """Begin a call of ``seconds``, which ``accepts`` allows, unless the worker reads it after ``until``.

        Raises ``BadFrame`` for an event that is too large.
        """
        number, waits = self._number + 1, len(self.calls) >= self.share
        ends_at = lease_clock() + seconds + (PREFETCH_SECONDS if waits else 0.0)
        sent = item(number, until, ends_at, len(body), *values, body=body)
        self._number = number
        call = Call(number, event, planned, ends_at, self._loop.create_future(), waits)
        self.calls[number] = call
        self._idle.clear()
        self._channel.send("deliver", sent, body)
        return call

    def cancel(self, call: Call) -> None:
        """End a call whose outcome is of no interest, if its handler lets itself be cancelled."""
        if call.number in self.calls:
            self._channel.send("cancel", b"%d" % call.number)

    async def check(self) -> str | None:
        """Return why the handler's database cannot be used, or None."""
        self._checked = self._loop.create_future()
        self._channel.send("check", b"null")
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await self._checked
        except TimeoutError:
            return f"dsn: no answer of the handler's database within {CHECK_SECONDS:g} s"

    async def cancel_all(self, seconds: float) -> None:
        """End every call, with the process if one of them has not ended within ``seconds``."""
        for call in self.calls.values():
            self.cancel(call)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        if self.calls:
            self._is_reset, self._end_reason = True, "the sink was reset"
            self._ended.set()
            await self._finished.wait()

    def _receive(self, frame: Frame) -> None:
        match frame:
            case ("done", numbers, _):
                for number in numbers:
                    self._answered(number, DONE)
                self._wake(len(numbers))
            case ("answer", answers, _):
                for answer in answers:
                    self._receive_answer(answer)
                self._wake(len(answers))
            case (kind, values, _):
                for value in values:
                    self._receive_other(kind, value)

    def _receive_answer(self, answer: object) -> None:
        match answer:
            case [
                int(number), str(outcome), str(reason), float() | int() | None as after, str(message)
            ] if outcome in OUTCOMES:  # fmt: skip
                self._answered(number, CallOutcome(outcome, reason, after, message))
            case _:
                raise BadFrame("an unknown answer")

    def _receive_other(self, kind: str, value: object) -> None:
        match kind, value:
            case "ready", [bool(is_async)]:
                self.is_async, self.ready = is_async, True
                self._wake(self._task.threads)
            case "unusable", [str(reason)] if not self.ready:
                self.problem = reason
            case "extend", [int(number), float(ends_at)]:
                if (call := self.calls.get(number)) is not None and not call.stuck:
                    call.ends_at = max(call.ends_at, min(ends_at, lease_clock() + MOST_EXTENSION_SECONDS))
            case "stuck", [int(number), bool(entered)]:
                if (call := self.calls.get(number)) is not None:
                    call.stuck = "stuck" if entered else "unavailable"
                    self._condemn(lease_clock(), "another call did not end in time")
            case "checked", [str() | None as found] if self._checked is not None and not self._checked.done():
                self._checked.set_result(found)
            case _:
                raise BadFrame("a frame of an unknown kind")

    def _answered(self, number: object, outcome: CallOutcome) -> None:
        if not isinstance(number, int) or not 0 < number <= self._number:
            raise BadFrame("an answer to no call")
        call = self.calls.pop(number, None)
        if call is None:
            return
        if call.waits and outcome.outcome == "unsent":
            outcome = WAITED
        self.served = True
        if not self.calls:
            self._idle.set()
        if not call.answer.done():
            call.answer.set_result(outcome)
