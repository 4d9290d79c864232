"""Sinks whose calls block: each runs in a thread until it ends, or its time limit does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

from outbox_relay.domain.errors import SessionReset, SinkStuck
from outbox_relay.domain.outcomes import Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.calls import Call, Completions, Sink

WAIT_SECONDS = 5.0
"""Maximum wait of a call for a thread."""
WITHDRAW_SECONDS = 10.0
"""Maximum wait for calls that are withdrawn while they run."""
PATIENCE_SECONDS = 5.0
"""Minimum time for which all threads hang before the process gives up."""
LATE = Unavailable("not delivered in time", behind=True, untouched=True)
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class Job:
    """A call in a sink. Times are values of ``lease_clock()``.

    ``planned`` is the end that the caller expects, and ``ends_at`` the end of the wait for a thread, or of the time
    limit once the call has begun.
    """

    call: Call
    number: int
    planned: float
    ends_at: float
    began_at: float = NEVER
    verdicts: Sequence[Verdict] | None = None


J = TypeVar("J", bound=Job)


class ThreadedSink(Sink, Generic[J]):
    """A sink that makes each call with ``run``, in one of ``max_in_flight`` threads.

    A thread cannot be ended. A call that outlasts its time limit fails, hangs, and keeps its thread until it ends; the
    sink continues with the other threads. If all of them have hung for as long again, ``completed`` raises
    ``SinkStuck``. That of a replay does not: it has few threads, for which no other sink must stop.

    The thread that has taken a job from ``_waiting`` decides what becomes of it, so no lock is needed.
    """

    job_type: type[J]

    def __init__(self, name: str, max_in_flight: int, timeout_seconds: float, *, of_replay: bool = False) -> None:
        self.max_in_flight, self.timeout_seconds = max_in_flight, timeout_seconds
        self._name = name
        self._of_replay = of_replay
        self._completions = Completions[J]()
        self._numbers = count()
        self._waiting: dict[int, J] = {}
        self._calls: dict[J, None] = {}
        self._hanging: dict[J, None] = {}
        """The calls without an end that the loop no longer waits for."""
        self._look_at = NEVER
        """The earliest time at which a call may be over its limit."""
        self._threads = 0
        self._jobs: SimpleQueue[J | None] = SimpleQueue()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    # -- what a kind of sink defines ------------------------------------------------------------------------------

    def run(self, job: J) -> Sequence[Verdict] | None:
        """Make the call, in a thread, and return its verdicts, or None if all events were delivered. Never raises."""
        raise NotImplementedError

    def timed_out(self, job: J) -> Sequence[Verdict]:
        """Return the verdicts of a call that has not ended in time."""
        raise NotImplementedError

    def start(self, job: J) -> None:
        """Have a thread take the job."""
        if self._threads < min(self.max_in_flight, len(self._calls) + len(self._hanging)):
            try:
                threading.Thread(target=self._work, args=(self._jobs,), name=self._name, daemon=True).start()
                self._threads += 1
            except RuntimeError:  # there can be no more threads: another one takes the job
                pass
        self._jobs.put(job)

    def cancel(self, job: J, now: float) -> bool:  # noqa: ARG002 - threads cannot be cancelled
        """Cancel a call whose time is over. Return False if that is impossible, or was done before."""
        return False

    @property
    def hangs(self) -> bool:
        """True if no call can be made because the threads hang."""
        return len(self._hanging) >= self.max_in_flight

    def reason_to_wait(self) -> Verdict:
        """Return the verdict of an event whose call found no thread."""
        return Unavailable(self.fault) if self.fault else Unavailable("all threads are busy", behind=True)

    # -- calls ----------------------------------------------------------------------------------------------------

    @property
    def hanging(self) -> int:
        """The number of calls that have outlasted their time limit, or their session, and have not ended."""
        return len(self._hanging)

    @property
    def trouble(self) -> str | None:
        """Return how many calls hang, or None."""
        if not self._hanging:
            return None
        return f"{len(self._hanging)} of {self.max_in_flight} calls have not ended in time, and cannot be ended"

    @property
    def fault(self) -> str | None:
        """Return the trouble if no call can be made."""
        return self.trouble if self.hangs else None

    def submit(self, call: Call) -> None:
        """See ``Sink``."""
        now = lease_clock()
        wait_ends_at = min(call.until, now + WAIT_SECONDS)
        job = self.job_type(call, next(self._numbers), now + self.timeout_seconds, wait_ends_at)
        self._calls[job] = None
        self._waiting[job.number] = job
        self._look_at = min(self._look_at, job.ends_at, job.planned)
        self.start(job)

    def begin(self, job: J) -> bool:
        """Return True if the call may begin now, in the thread that makes it."""
        now = lease_clock()
        in_time, job.began_at, job.ends_at = now < job.call.until, now, now + self.timeout_seconds
        if self._waiting.pop(job.number, None) is None:
            return False
        if not in_time:
            self._end(job, LATE)
        return in_time

    def _end(self, job: J, verdict: Verdict) -> None:
        job.verdicts = [verdict] * len(job.call.events)
        self._completions.put(job)

    def _work(self, jobs: SimpleQueue[J | None]) -> None:
        while (job := jobs.get()) is not None:
            if self.begin(job):
                job.verdicts = Context().run(self.run, job)  # variables do not pass from one event to the next
                self._completions.put(job)

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended. Raises ``SinkStuck``."""
        ended: list[Call] = []
        for job in self._completions.take(max(0.0, min(seconds, self._look_at - lease_clock()))):
            self._hanging.pop(job, None)
            if job in self._calls:
                self._leave(job, job.verdicts, ended)
        if (now := lease_clock()) >= self._look_at:
            self._look(now, ended)
        if self.hangs and not ended and not self._of_replay:
            since = max(job.ends_at for job in self._hanging)
            if now >= since + max(self.timeout_seconds, PATIENCE_SECONDS):
                raise SinkStuck(f"sink {self._name}: {self.trouble}")
        return ended

    def _leave(self, job: J, verdicts: Sequence[Verdict] | None, ended: list[Call]) -> None:
        del self._calls[job]
        job.call.end(verdicts)
        ended.append(job.call)

    def _look(self, now: float, ended: list[Call]) -> None:
        """End the calls whose wait or time limit is over."""
        self._look_at = NEVER
        for job in list(self._calls):
            if now >= job.ends_at and not self.cancel(job, now):
                if self._waiting.pop(job.number, None):
                    self._leave(job, [self.reason_to_wait()] * len(job.call.events), ended)
                    continue
                if now >= job.ends_at:  # it has not begun in this moment
                    self._hanging[job] = None
                    self._leave(job, self.timed_out(job), ended)
                    continue
            self._look_at = min(self._look_at, job.ends_at, now + self.timeout_seconds)

    def wake(self) -> None:
        """See ``Sink``."""
        self._completions.wake()

    def deadlines(self) -> Mapping[int, float]:
        """See ``Sink``."""
        late = [job for job in self._calls if job.number not in self._waiting and job.ends_at > job.planned + 1.0]
        return {event.id: job.ends_at for job in late for event in job.call.events}

    # -- ends -----------------------------------------------------------------------------------------------------

    def purge(self) -> None:
        """See ``Sink``."""
        for number in list(self._waiting):
            if (job := self._waiting.pop(number, None)) is not None:
                self._end(job, LATE)

    def withdraw(self) -> None:
        """Begin no call any more, and wait for the others. Those that outlast their time limit count as hanging.

        Raises ``SessionReset`` if others go on: they may still have effects.
        """
        self.purge()
        now = lease_clock()
        for job in self._calls:
            self.cancel(job, now)
        until, left = now + WITHDRAW_SECONDS, 0.0
        while True:
            for job in self._completions.take(left):
                self._calls.pop(job, None)
                self._hanging.pop(job, None)
            now = lease_clock()
            if (left := min(until, max((job.ends_at for job in self._calls), default=now)) - now) <= 0:
                break
        self._hanging.update((job, None) for job in self._calls if now >= job.ends_at)
        self._calls = {job: None for job in self._calls if job not in self._hanging}
        if self._calls:
            raise SessionReset(
                f"sink {self._name}: {len(self._calls)} calls have not ended within {WITHDRAW_SECONDS:g} s"
            )
        self._look_at = NEVER

    def close(self) -> None:
        """End the threads, once their calls have ended."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads, self._jobs = 0, SimpleQueue()
