"""A sink that keeps what it is given: for tests, with scripted verdicts."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks import Call
from outbox_relay.sinks.posting import PostingSink

BOTH = pytest.mark.parametrize("keeps_order", [True, False], ids=["batches", "requests"])
Script = Callable[[StoredEvent, int], Verdict | Awaitable[Verdict]]
"""Says what becomes of an event at its attempt (from 1); may wait before it does."""


def _always(_event: StoredEvent, _attempt: int) -> Verdict:
    return DELIVERED


class Gate:
    """A fact that a test tells a client, or a client a test, across threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set, self.is_set, self.clear = self._event.set, self._event.is_set, self._event.clear

    async def wait(self) -> None:
        """Wait for the fact in the thread of a client."""
        while not self._event.is_set():  # noqa: ASYNC110 - tests set it in their threads
            await asyncio.sleep(0.005)

    def becomes(self, seconds: float = 20) -> None:
        """Wait for the fact in the thread of a test."""
        assert self._event.wait(seconds), f"not within {seconds:g} s"


class OrderedSink(PostingSink):
    """A ``MemorySink`` that keeps order, whose stopped keys go on once every call has been taken."""

    _untaken = 0

    def submit(self, call: Call) -> None:
        """See ``Sink``."""
        self._untaken += 1
        super().submit(call)

    def completed(self, seconds: float) -> Sequence[Call]:
        """See ``Sink``."""
        calls = super().completed(seconds)
        self._untaken -= len(calls)
        if not self._untaken:
            self._go_on()
        return calls

    def withdraw(self) -> None:
        """See ``Sink``."""
        super().withdraw()
        self._untaken = 0
        self._go_on()

    def _go_on(self) -> None:
        cast("Any", self.client).go_on()


class MemorySink:
    """Records deliveries in order. ``script`` is asked for the verdict of each event.

    With ``keeps_order`` it takes batches, one after another, as a log does; without, single events, many at once, as
    HTTP does. With ``holds`` nothing of a key follows a refused event until the calls under way have returned.
    """

    timeout_seconds = 15.0

    def __init__(
        self,
        script: Script = _always,
        *,
        keeps_order: bool = True,
        max_in_flight: int | None = None,
        holds: bool = False,
    ) -> None:
        self.keeps_order = keeps_order
        self._holds = holds
        self.max_batch = 4000 if keeps_order else 1
        self.max_in_flight = max_in_flight or (2 if keeps_order else 64)
        self.delivered: list[StoredEvent] = []
        """Every delivery, repeated ones too, in the order in which they came."""
        self.attempts: list[int] = []
        """The ids of the events that the script was asked about, in that order."""
        self._script = script
        self._tried: Counter[int] = Counter()
        self._turn = asyncio.Lock()
        self._stopped: dict[str, Unavailable] = {}
        self._resets = 0

    async def open(self) -> None:
        """Belong to the event loop that opens it, which is not that of an earlier relay."""
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """Forget what is under way; deliveries stay recorded."""
        await self.reset()

    async def check(self) -> str | None:
        """Do nothing: the destination is always there."""
        return None

    async def reset(self) -> None:
        """Forget the open calls: nothing of them is recorded any more."""
        self._resets += 1

    async def deliver(self, batch: Sequence[StoredEvent], until: float, _attempt: int = 0, /) -> Sequence[Verdict]:
        """See ``Sink``. After an event of a key that is neither delivered nor refused, its later ones are unavailable.

        That holds until every call has been taken: see ``OrderedSink``.
        """
        resets = self._resets
        if not self.keeps_order:
            return [await self._one(event, until, resets) for event in batch]
        async with self._turn:
            return [await self._in_order(event, until, resets) for event in batch]

    def go_on(self) -> None:
        """Deliver stopped keys again: every call has been taken."""
        self._stopped.clear()

    async def _in_order(self, event: StoredEvent, until: float, resets: int) -> Verdict:
        if event.key is None:
            return await self._one(event, until, resets)
        if (stopped := self._stopped.get(event.key)) is not None:
            return stopped
        verdict = await self._one(event, until, resets)
        if isinstance(verdict, Refused):
            if self._holds:
                self._stopped[event.key] = Unavailable("behind an event that was refused", behind=True)
        elif not isinstance(verdict, Delivered):
            self._stopped[event.key] = Unavailable(verdict.reason)
        return verdict

    async def _one(self, event: StoredEvent, until: float, resets: int) -> Verdict:
        if lease_clock() >= until:
            return Unavailable("not delivered in time")
        if resets == self._resets:
            self._tried[event.id] += 1
            self.attempts.append(event.id)
            verdict = self._script(event, self._tried[event.id])
            if inspect.isawaitable(verdict):
                verdict = await verdict
            if resets == self._resets:
                if isinstance(verdict, Delivered):
                    self.delivered.append(event)
                return verdict
        return Unavailable("the sink was reset")


def fails(count: int, which: Iterable[int] | None = None, verdict: Verdict | None = None) -> Any:
    """Return a script that answers the first `count` attempts of the events `which` with `verdict`.

    Without `which` it does so for all events; without `verdict` they fail.
    """
    chosen = None if which is None else set(which)

    def script(event: StoredEvent, attempt: int) -> Verdict:
        if attempt <= count and (chosen is None or event.id in chosen):
            return verdict or Failed("not now", 500)
        return DELIVERED

    return script


class Late:
    """A script that is set after the events have ids."""

    def __init__(self) -> None:
        self.script: Any = None

    def __call__(self, event: StoredEvent, attempt: int) -> Any:
        return DELIVERED if self.script is None else self.script(event, attempt)
