"""The Python sink: one event, one call of the handler, one verdict."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from json import loads
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from outbox_relay.delivery import Delivery
from outbox_relay.domain.outcomes import Attempt, Failed, Unavailable, Verdict, clip
from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.dsn import find_authorities
from outbox_relay.sinks.posting import EventLoopThread
from outbox_relay.sinks.python.handler import TIMED_OUT, Handler, Unusable, check_result, described, load, verdict_of
from outbox_relay.sinks.python.transactions import Transactions, reason_of
from outbox_relay.sinks.threads import LATE, NEVER, Job, ThreadedSink

if TYPE_CHECKING:
    from outbox_relay.settings import PythonSettings
    from outbox_relay.sinks import SinkContext

CHECK_SECONDS = 60.0
"""Maximum wait of ``check`` for the import of the handler."""
IMPORT_SECONDS = 10.0
"""Minimum interval between two imports, and the maximum wait of ``open`` for one."""
GRACE_SECONDS = 1.0
"""Time after its cancellation within which an asynchronous handler must end."""
HANDLERS = EventLoopThread("handlers")
"""The thread of asynchronous handlers: one that blocks its event loop must not delay the responses of webhooks."""
DATABASE_SILENT = "dsn: the handler's database did not answer in time"


class TooLate(Exception):
    """The handler was not called: another relay may own the shard of the event by now."""


@dataclass(slots=True, eq=False)
class HandlerJob(Job):
    """A call of the handler. ``entered``: it was called."""

    handler: Handler | None = None
    entered: bool = False
    cancelled_at: float = NEVER
    task: asyncio.Task[Any] | None = None
    reached: bool = False
    """True once the event loop has cancelled the task."""


class _Import:
    """The handler, once it is imported, or why it cannot be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handler: Handler | None = None
        self.problem: str | None = None
        self._begun_at = -NEVER
        self._ended = threading.Event()
        self._ended.set()

    def begin(self) -> None:
        """Import the handler in a thread, unless that was done, is being done, or has just failed."""
        if self.handler is None and self._ended.is_set() and lease_clock() >= self._begun_at + IMPORT_SECONDS:
            self._ended.clear()
            self._begun_at = lease_clock()
            self.problem = self.problem or f"handler {self.name} is being imported"
            try:
                threading.Thread(target=self._run, name=f"import {self.name}", daemon=True).start()
            except BaseException:  # there can be no more threads
                self._ended.set()
                raise

    def wait(self, seconds: float) -> str | None:
        """Return why the handler cannot be imported, or None once it is."""
        self.begin()
        self._ended.wait(seconds)
        return self.problem

    def _run(self) -> None:
        try:
            self.handler = load(self.name)
            self.problem = None
        except Unusable as error:
            self.problem = clip(str(error))
        except BaseException as error:  # such as the loss of the working directory
            self.problem = clip(f"handler {self.name} cannot be imported: {described(error)}")
        finally:
            self._ended.set()


class PythonSink(ThreadedSink[HandlerJob]):
    """A sink that calls a handler: an asynchronous one in the thread ``posting``, any other in threads of the sink.

    The handler is imported by ``open``. While it cannot be, every event is unavailable, and the import is repeated.
    """

    job_type = HandlerJob

    def __init__(
        self,
        name: str,
        handler: str,
        *,
        max_in_flight: int = 64,
        timeout_seconds: float = 15.0,
        dsn: str = "",
        replay: int | None = None,
        posting: EventLoopThread = HANDLERS,
    ) -> None:
        super().__init__(name, max_in_flight, timeout_seconds, of_replay=replay is not None)
        self._posting = posting
        self._replay = replay
        self._import = _Import(handler)
        self._begun: deque[HandlerJob] = deque()
        self._transactions = Transactions(dsn, name, timeout_seconds) if dsn else None

    @property
    def trouble(self) -> str | None:
        """Return why the handler cannot be called, or how many calls hang, or None."""
        blocks = "the handler blocks the event loop" if self._blocks else None
        return self._import.problem or blocks or super().trouble

    @property
    def fault(self) -> str | None:
        """Return why the handler cannot be called, or None."""
        return self._import.problem or super().fault

    @property
    def hangs(self) -> bool:
        """True if no call can be made, because all hang, or one of them blocks the event loop."""
        return self._blocks or super().hangs

    @property
    def _blocks(self) -> bool:
        """True if the event loop does not even cancel calls."""
        return any(job.task and not job.reached for job in list(self._hanging))

    def open(self) -> None:
        """Import the handler. If that takes long, it continues meanwhile."""
        self._import.wait(IMPORT_SECONDS)

    def check(self) -> str | None:
        """Return why the handler cannot be called, or None. With a transaction, its database is asked too."""
        problem = self._import.wait(CHECK_SECONDS)
        return problem or (self._transactions.check() if self._transactions else None)

    def close(self) -> None:
        """End the threads, and close connections."""
        super().close()
        if self._transactions:
            self._transactions.close()

    # -- calls ----------------------------------------------------------------------------------------------------

    def start(self, job: HandlerJob) -> None:
        """Begin the call of the handler, or end it while the handler cannot be called."""
        job.handler = self._import.handler
        if job.handler is None:
            self._import.begin()
            if self._waiting.pop(job.number, None):
                self._end(job, self.reason_to_wait())
        elif job.handler.is_async and not self.hangs:
            self._begun.append(job)
            if len(self._begun) == 1:
                self._posting.call_soon(self._begin_tasks)
        elif not job.handler.is_async:
            super().start(job)

    def _enter(self, job: HandlerJob, delivery: Delivery) -> Any:
        """Call the handler, unless it is too late: it may have waited for its database, or for the event loop."""
        assert job.handler  # noqa: S101
        now = lease_clock()
        if now >= job.call.until or now >= job.ends_at:
            raise TooLate
        job.entered = True
        return job.handler.call(delivery)

    def run(self, job: HandlerJob) -> Sequence[Verdict] | None:
        """Call a plain handler, in a thread of the sink."""
        try:
            delivery = self._delivery(job)
            enter = partial(self._enter, job, delivery)
            if self._transactions:
                self._transactions.run(delivery, lambda: check_result(enter()))
            else:
                check_result(enter())
        except BaseException as error:  # SystemExit too
            return [self._verdict(error, job)]
        return None

    def _begin_tasks(self) -> None:
        loop = asyncio.get_running_loop()
        while self._begun:
            job = self._begun.popleft()
            job.task = loop.create_task(self._arun(job))

    async def _arun(self, job: HandlerJob) -> None:
        """Call an asynchronous handler. No exception leaves this: some would end the event loop."""
        if not self.begin(job):
            return
        try:
            delivery = self._delivery(job)
            enter = partial(self._enter, job, delivery)
            if self._transactions:
                await self._transactions.arun(delivery, lambda: _checked(enter()))
            else:
                await _checked(enter())
            job.verdicts = None
        except BaseException as error:
            job.verdicts = [self._verdict(error, job)]
        self._completions.put(job)

    def _verdict(self, error: BaseException, job: HandlerJob) -> Verdict:
        seconds = lease_clock() - job.began_at
        if isinstance(error, TooLate):
            return LATE
        if self._transactions and not job.entered:
            if isinstance(error, psycopg.Error):
                return Unavailable(clip(reason_of(error)), attempt=Attempt("database", seconds))
            if job.cancelled_at != NEVER:
                return Unavailable(DATABASE_SILENT, attempt=Attempt("database", seconds))
        return verdict_of(error, seconds, cancelled=job.cancelled_at != NEVER)

    # -- time limits ----------------------------------------------------------------------------------------------

    def cancel(self, job: HandlerJob, now: float) -> bool:
        """Cancel an asynchronous call. Return False if it was cancelled before, or cannot be."""
        if job.task is None or job.number in self._waiting or job.cancelled_at != NEVER:
            return False
        job.cancelled_at, job.ends_at = now, now + GRACE_SECONDS
        self._posting.call_soon(partial(_cancel, job, job.task))
        return True

    def timed_out(self, job: HandlerJob) -> Sequence[Verdict]:
        """Return the verdict of an event whose handler has not ended in time."""
        seconds = lease_clock() - job.began_at
        if self._transactions and not job.entered:
            return [Unavailable(DATABASE_SILENT, attempt=Attempt("database", seconds))]
        return [Failed(TIMED_OUT, attempt=Attempt("timeout", seconds))]

    def _extend(self, job: HandlerJob, seconds: float) -> datetime | None:
        """Move the end of a call, and return the new one; None if it is later already, or over. For any thread."""
        now = lease_clock()
        if job.cancelled_at != NEVER or not now < job.ends_at < now + seconds:
            return None
        job.ends_at = now + seconds
        return datetime.now(UTC) + timedelta(seconds=seconds)

    def _delivery(self, job: HandlerJob) -> Delivery:
        [event] = job.call.events
        headers: dict[str, str] = loads(event.headers) if event.headers else {}
        if self._replay is not None:
            headers["outbox-replay"] = str(self._replay)
        return Delivery(
            *(UUID(event.uid), event.type, event.key, event.payload, event.content_type, headers),
            *(max(job.call.attempt, 1), event.created_at, event.deliver_at),
            datetime.now(UTC) + timedelta(seconds=job.ends_at - lease_clock()),
            event.tenant,
            _extend=partial(self._extend, job),
        )


def python(settings: PythonSettings, context: SinkContext) -> PythonSink:
    """Return a Python sink."""
    dsn = settings.dsn.get_secret_value() if settings.transaction and settings.dsn is not None else ""
    find_authorities(dsn)
    return PythonSink(
        context.name,
        settings.handler,
        max_in_flight=context.slots or settings.max_in_flight,
        timeout_seconds=settings.timeout_seconds,
        dsn=dsn,
        replay=context.replay,
    )


async def _checked(result: Any) -> None:
    check_result(await result)


def _cancel(job: HandlerJob, task: asyncio.Task[Any]) -> None:
    job.reached = True
    task.cancel()
