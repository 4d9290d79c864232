"""One call of ``deliver`` as the thread sees it: what was handed over, what came back, what the verdicts are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from confluent_kafka import KafkaError

from outbox_relay.event import Event
from outbox_relay.policy import DELIVERED, Unavailable, Verdict


@dataclass(slots=True, eq=False)
class Course:
    """A stretch of calls that stand or fall together: after one event is unavailable, no later one is handed over.

    A new course begins only when every call of the last one has returned, so that whoever calls has seen the end.
    """

    under_way: int = 0
    """Calls that have not returned yet; counted in the event loop."""
    ended: str | None = None
    """Why nothing more is handed over."""
    withdrawn: bool = False
    """Whether what was handed over is to be taken back too."""
    blocked: set[str] = field(default_factory=set[str])
    """Keys of which an event is unavailable: so is what comes later."""


class Reports:
    """Counts the delivery reports of one call and keeps those that failed, by place; serves one call after another.

    One callback per place, made once: nothing is made per event.
    """

    __slots__ = ("callbacks", "count", "failures")

    def __init__(self, places: int) -> None:
        self.count = 0
        self.failures: dict[int, KafkaError] = {}
        self.callbacks: Sequence[Callable[[KafkaError | None, object], None]] = [
            partial(self._report, place) for place in range(places)
        ]

    def clear(self) -> None:
        """Begin anew, once every report of the last call has come."""
        self.count = 0
        self.failures = {}

    def _report(self, place: int, error: KafkaError | None, _: object) -> None:
        self.count += 1
        if error is not None:
            self.failures[place] = error


@dataclass(slots=True, eq=False)
class Call:
    """A batch on its way. ``until`` and ``deadline`` are ``time.monotonic()`` values.

    ``answer`` takes the verdicts, in the thread, exactly once.
    """

    batch: Sequence[Event]
    until: float
    """Nothing is handed over from here on."""
    deadline: float
    """By now the call must have been answered."""
    course: Course
    answer: Callable[[Sequence[Verdict]], None]
    reports: Reports
    todo: Sequence[int]
    """Places not handed over yet, in order."""
    topics: Sequence[str | None] = ()
    """The topic of each place; none where the event was refused before."""
    sent: int = 0
    """Records handed over, those sent again counted again."""
    judged: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    """Verdicts that stand already, by place."""
    lost: Sequence[int] = ()
    """Places given up."""

    @property
    def outstanding(self) -> int:
        """Records handed over and not reported on yet."""
        return self.sent - self.reports.count

    @property
    def complete(self) -> bool:
        """Whether nothing more will be heard of any place."""
        return not self.todo and self.sent == self.reports.count

    def give_up(self) -> None:
        """Hand over nothing more."""
        self.lost = [*self.lost, *self.todo]
        self.todo = ()

    def verdicts(self) -> Sequence[Verdict]:
        """One verdict per place. What follows an unavailable event of its key is unavailable, acknowledged or not."""
        verdicts: list[Verdict] = [DELIVERED] * len(self.batch)
        if self.course.ended is None and not self.judged:
            return verdicts
        unavailable = Unavailable(self.course.ended or "")
        for place, verdict in self.judged.items():
            verdicts[place] = verdict
        for place in chain(self.lost, self.reports.failures):
            verdicts[place] = unavailable
        blocked = self.course.blocked
        for place, event in enumerate(self.batch):
            if event.key is None:
                continue
            if event.key in blocked:
                verdicts[place] = unavailable
            elif verdicts[place] is unavailable:
                blocked.add(event.key)
        return verdicts
