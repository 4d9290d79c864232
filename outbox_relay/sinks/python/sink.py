"""The Python sink: one event, one call of the handler, one verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from outbox_relay.delivery import MOST_DELAY_SECONDS
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict, clip
from outbox_relay.sinks.python.output import Report
from outbox_relay.sinks.python.pool import BUSY, OnEnd, WorkerPool
from outbox_relay.sinks.python.worker_process import DONE, WAITED, CallOutcome, WorkerProcess, WorkerTask
from outbox_relay.worker.frames import BadFrame

CHECK_SECONDS = 60.0
"""Maximum wait of ``check`` for the import of the handler."""
RESET_SECONDS = 1.0
"""Time within which calls must end at a reset."""
MOST_SUSPECTS = 10_000
"""Maximum number of events that are remembered because their worker ended while they were handled."""
MARGIN_SECONDS = 5.0
"""Time by which the lease of a row outlasts its call."""
LATE = "not delivered in time"


class PythonSink:
    """A sink that calls a handler in ``workers`` child processes.

    An event whose worker ended for an unknown reason is a suspect: no attempt is counted, and it is handled alone the
    next time, by a worker of its own. If that ends too, the event is the reason, and the attempt counts.
    """

    max_batch = 1
    keeps_order = False

    def __init__(
        self,
        name: str,
        task: WorkerTask,
        *,
        report: Report,
        on_end: OnEnd,
        workers: int = 1,
        max_in_flight: int = 64,
        timeout_seconds: float = 15.0,
        delivery_details: bool = False,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_in_flight = max_in_flight
        self._name = name
        self._task = task
        self._delivery_details = delivery_details
        self._pool = WorkerPool(task, workers, max_in_flight, report, on_end, prefetches=True)
        self._alone = WorkerPool(task, 1, 1, report, on_end)
        self._suspects: dict[int, None] = {}
        self._alone_users = 0
        self._resets = 0

    def __repr__(self) -> str:
        return f"PythonSink({self._name!r})"

    @property
    def trouble(self) -> str | None:
        """Return why the handler cannot be called, or None."""
        problem = self._pool.problem
        return None if problem is None else clip(problem)

    @property
    def fault(self) -> str | None:
        """Return why this process cannot call the handler, or None."""
        return self.trouble

    @property
    def prefetch(self) -> int:
        """The number of calls that may wait in the workers at present."""
        return self._pool.prefetch

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The worker processes."""
        return [*self._pool.processes, *self._alone.processes]

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of calls that last longer than planned, by event, as values of ``lease_clock()``."""
        calls = (call for process in self.processes for call in process.calls.values())
        return {call.event: call.ends_at + MARGIN_SECONDS for call in calls if call.ends_at > call.planned + 1.0}

    async def open(self) -> None:
        """Start the workers. Their handler may still be imported when this returns."""
        await self._pool.open()

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver one event, or none, as ``Sink.deliver`` specifies. The handler is given ``attempt``, from 1."""
        return [await self._one(event, until, attempt) for event in batch]

    async def _one(self, event: StoredEvent, until: float, attempt: int) -> Verdict:
        began, resets = lease_clock(), self._resets
        if began >= until:
            return Unavailable(LATE)
        if self._suspects and event.id in self._suspects:
            return await self._deliver_alone(event, until, attempt, began)
        process = self._pool.free() or await self._pool.take(until)
        if isinstance(process, str):
            return Unavailable(clip(process), behind=process == BUSY)
        answer = await self._call(process, event, until, attempt, began)
        if answer is DONE:
            details = self._delivery_details or attempt
            return Delivered(seconds=lease_clock() - began) if details else DELIVERED
        if answer.outcome == "died":
            self._suspect(event)
        return self._counted(self._verdict(answer, lease_clock() - began, alone=False), resets)

    async def _deliver_alone(self, event: StoredEvent, until: float, attempt: int, began: float) -> Verdict:
        """Deliver a suspect with a worker of its own. That worker ends when there is nothing for it to do."""
        resets = self._resets
        self._alone_users += 1
        try:
            await self._alone.open()
            process = await self._alone.take(until)
            if isinstance(process, str):
                return Unavailable(clip(process), behind=self._pool.problem is None)
            answer = await self._call(process, event, until, attempt, began)
        finally:
            self._alone_users -= 1
        if answer.outcome not in ("died", "unsent", "reset"):
            self._suspects.pop(event.id, None)
        if not self._alone_users:
            await self._alone.close()
        return self._counted(self._verdict(answer, lease_clock() - began, alone=True), resets)

    async def _call(
        self, process: WorkerProcess, event: StoredEvent, until: float, attempt: int, began: float
    ) -> CallOutcome:
        planned = began + self.timeout_seconds
        try:
            call = process.begin(event.id, _values(event, attempt), event.payload, until, planned, self.timeout_seconds)
        except BadFrame as error:
            return CallOutcome("dead", str(error))
        try:
            return await call.answer
        except asyncio.CancelledError:
            process.cancel(call)
            raise

    def _counted(self, verdict: Verdict, resets: int) -> Verdict:
        """Return the verdict that counts: a call that a reset ended has none of its own."""
        if resets != self._resets and not isinstance(verdict, Delivered):
            return Unavailable("the sink was reset")
        return verdict

    def _verdict(self, answer: CallOutcome, seconds: float, *, alone: bool) -> Verdict:
        reason = answer.reason
        match answer.outcome:
            case "done":
                return Delivered(seconds=seconds)
            case "retry":
                after = None if answer.after is None or not answer.after >= 0 else min(answer.after, MOST_DELAY_SECONDS)
                text = f"the handler asked for a retry{': ' if reason else ''}{reason}"
                return Failed(text, retry_after_seconds=after, attempt=Attempt("retry", seconds))
            case "dead":
                text = f"the handler refused the event{': ' if reason else ''}{reason}"
                return Refused(text, attempt=Attempt("dead", seconds))
            case "failed":
                return Failed(reason, attempt=Attempt("exception", seconds, answer.message or None))
            case "timeout" | "stuck":
                killed = ", and its worker was killed" if answer.outcome == "stuck" else ""
                return Failed(f"the handler did not end in time{killed}", attempt=Attempt("timeout", seconds))
            case "unavailable":
                return Unavailable(reason, attempt=Attempt("database", seconds))
            case "bystander":
                text = "its worker was killed, because another call did not end in time"
                return Unavailable(text, attempt=Attempt("bystander", seconds), behind=True)
            case "died":
                return _of_an_end(reason, seconds, alone=alone)
            case _:
                return (
                    Unavailable(BUSY, behind=True, untouched=True) if answer is WAITED else Unavailable(reason or LATE)
                )

    def _suspect(self, event: StoredEvent) -> None:
        if len(self._suspects) >= MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects[event.id] = None

    async def reset(self) -> None:
        """End every call, if need be with its worker; no handler runs for them afterwards."""
        self._resets += 1
        await asyncio.gather(self._pool.reset(RESET_SECONDS), self._alone.reset(RESET_SECONDS))

    async def import_fault(self, seconds: float) -> str | None:
        """Return why the handler cannot be imported, or None once a worker has imported it or after ``seconds``."""
        await self._pool.started(seconds)
        return self.fault

    async def check(self) -> str | None:
        """Return why the handler cannot be called, or None. With a transaction, its database is asked too."""
        process = await self._pool.started(CHECK_SECONDS)
        if isinstance(process, str):
            return process
        return await process.check() if self._task.dsn else None

    async def close(self) -> None:
        """Kill the workers."""
        self._resets += 1
        await asyncio.gather(self._pool.close(), self._alone.close())


def _of_an_end(reason: str, seconds: float, *, alone: bool) -> Verdict:
    """Return the verdict on an event whose worker ended for a reason that is not known."""
    attempt = Attempt("worker_ended", seconds)
    if alone:
        return Failed(f"its worker ended: {reason}", attempt=attempt)
    return Unavailable(f"its worker ended: {reason}; it is delivered alone next", attempt=attempt, behind=True)


def _values(event: StoredEvent, attempt: int) -> tuple[str | int | None, ...]:
    due = None if event.deliver_at is None else event.deliver_at.isoformat()
    return (
        *(event.uid, event.type, event.key, event.content_type, event.headers),
        *(event.created_at.isoformat(), due, max(attempt, 1), event.tenant),
    )
