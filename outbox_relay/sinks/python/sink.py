"""The Python sink: one event, one call of the handler, one verdict."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks.python.output import Report
from outbox_relay.sinks.python.pool import OnEnd, WorkerPool
from outbox_relay.sinks.python.worker_process import CallBegan, CallOutcome, Limits, WorkerProcess, WorkerTask

CHECK_SECONDS = 60.0
"""Maximum wait of ``check`` for the import of the handler."""
RESET_SECONDS = 1.0
"""Time within which calls must end at a reset."""
MOST_SUSPECTS = 10_000
"""Maximum number of events that are remembered because their worker ended while they were handled."""
MARGIN_SECONDS = 5.0
"""Time by which the lease of a row outlasts its call."""


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
        replay: int | None = None,
        delivery_details: bool = False,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_in_flight = max_in_flight
        self._name = name
        self._task = task
        self._replay = replay
        self._delivery_details = delivery_details
        self._pool = WorkerPool(task, workers, math.ceil(max_in_flight / workers), report, on_end)
        self._alone = WorkerPool(task, 1, 1, report, on_end)
        self._suspects: dict[int, None] = {}
        self._calls: dict[int, tuple[CallBegan, float]] = {}
        self._resets = 0

    def __repr__(self) -> str:
        return f"PythonSink({self._name!r})"

    @property
    def trouble(self) -> str | None:
        """Return why the handler cannot be called, or None."""
        return self._pool.problem

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The worker processes."""
        return [*self._pool.processes, *self._alone.processes]

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of calls that last longer than planned, by event, as values of ``lease_clock()``."""
        return {
            event: began.call.ends_at + MARGIN_SECONDS
            for event, (began, planned) in self._calls.items()
            if began.call is not None and (began.call.extended or began.call.ends_at > planned + 1.0)
        }

    async def open(self) -> None:
        """Start the workers. Their handler may still be imported when this returns."""
        self._pool.open()

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver one event, or none, as ``Sink.deliver`` specifies. The handler is given ``attempt``, from 1."""
        return [await self._one(event, until, attempt) for event in batch]

    async def _one(self, event: StoredEvent, until: float, attempt: int) -> Verdict:
        if lease_clock() >= until:
            return Unavailable("not delivered in time")
        resets, alone, began = self._resets, event.id in self._suspects, time.monotonic()
        pool = self._alone if alone else self._pool
        if alone:
            pool.open()
        call = CallBegan()
        self._calls[event.id] = call, lease_clock() + self.timeout_seconds
        try:
            process = await pool.take(lambda: resets == self._resets)
            if isinstance(process, str):
                return Unavailable(process, behind=alone and pool.problem is None)
            try:
                limits = Limits(until, self.timeout_seconds, self._replay, call)
                answer = await process.call(_values(event, attempt), event.payload, limits)
            finally:
                pool.give_back(process)
        finally:
            self._calls.pop(event.id, None)
        if alone:
            await self._end_alone(event, answer)
        verdict = self._verdict(event, answer, time.monotonic() - began, alone=alone)
        if resets != self._resets and not isinstance(verdict, Delivered):
            return Unavailable("the sink was reset")
        details = verdict is DELIVERED and (self._delivery_details or attempt)
        return Delivered(seconds=time.monotonic() - began) if details else verdict

    async def _end_alone(self, event: StoredEvent, answer: CallOutcome) -> None:
        """Forget a suspect that its worker survived, and end that worker when there are no others."""
        if answer.outcome not in ("died", "unsent"):
            self._suspects.pop(event.id, None)
        if not self._suspects and not any(process.calls for process in self._alone.processes):
            await self._alone.close()

    def _verdict(self, event: StoredEvent, answer: CallOutcome, seconds: float, *, alone: bool) -> Verdict:
        reason = answer.reason
        match answer.outcome:
            case "done":
                return DELIVERED
            case "retry":
                after = answer.after if answer.after is not None and 0 <= answer.after < math.inf else None
                text = f"the handler asked for a retry{': ' if reason else ''}{reason}"
                return Failed(text, retry_after_seconds=after, attempt=Attempt("retry", seconds))
            case "dead":
                text = f"the handler refused the event{': ' if reason else ''}{reason}"
                return Refused(text, attempt=Attempt("dead", seconds))
            case "failed":
                return Failed(reason, attempt=Attempt("exception", seconds))
            case "timeout" | "stuck":
                killed = ", and its worker was killed" if answer.outcome == "stuck" else ""
                return Failed(f"the handler did not end in time{killed}", attempt=Attempt("timeout", seconds))
            case "unavailable":
                return Unavailable(reason, attempt=Attempt("database", seconds))
            case "bystander":
                text = "its worker was killed, because another call did not end in time"
                return Unavailable(text, attempt=Attempt("bystander", seconds), behind=True)
            case "died" if alone:
                return Failed(f"its worker ended: {reason}", attempt=Attempt("worker_ended", seconds))
            case "died":
                self._suspect(event)
                text = f"its worker ended: {reason}; it is delivered alone next"
                return Unavailable(text, attempt=Attempt("worker_ended", seconds), behind=True)
            case _:
                return Unavailable(reason or "not delivered in time")

    def _suspect(self, event: StoredEvent) -> None:
        if len(self._suspects) >= MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects[event.id] = None

    async def reset(self) -> None:
        """End every call, if need be with its worker; no handler runs for them afterwards."""
        self._resets += 1
        await asyncio.gather(self._pool.reset(RESET_SECONDS), self._alone.reset(RESET_SECONDS))

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


def _values(event: StoredEvent, attempt: int) -> tuple[str | int | None, ...]:
    due = None if event.deliver_at is None else event.deliver_at.isoformat()
    return (
        *(event.uid, event.type, event.key, event.content_type, event.headers),
        *(event.created_at.isoformat(), due, max(attempt, 1)),
    )
