"""The circuit breaker of one sink in this process, and the tasks that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

from outbox_relay.domain.circuit import Circuit, CircuitPolicy
from outbox_relay.domain.outcomes import Unavailable

BLOCKED_POLL_SECONDS = 1.0
"""Interval at which waiting tasks check the circuit while nothing may be sent, for example during a handover."""

GONE_SECONDS = 10.0
"""Minimum pause after a destination reports that it is gone. By then every relay knows that the sink is paused."""


class Permit(NamedTuple):
    """The admission of one call in a ``term`` of the circuit."""

    term: int
    probe: bool


class CircuitBreaker:
    """One circuit, shared by everything that sends to the sink.

    ``changed`` is set when its state may have changed. Nothing is sent while ``may_send`` returns False. Those that
    wait for an admission get it in the order in which they came, so that each in turn is the probe.
    """

    def __init__(
        self, policy: CircuitPolicy, changed: asyncio.Event, may_send: Callable[[], bool] = lambda: True
    ) -> None:
        self._circuit = Circuit(policy)
        self._changed = changed
        self._may_send = may_send
        self._state_changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self.gone: str | None = None
        """The reason given by a destination that reported that it is gone, until the sink is paused."""
        self.handing_over = False
        """True if no call is admitted any more."""

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        return self._circuit.state

    @property
    def closed(self) -> bool:
        """True while events flow."""
        return self._circuit.state == "closed" and self._may_send()

    @property
    def failing_since(self) -> float | None:
        """The time of the first failure that no delivery has followed, if the circuit is closed; otherwise None."""
        return self._circuit.failing_since if self._circuit.state == "closed" else None

    @property
    def unavailable_since(self) -> float | None:
        """The time since which every attempt was unavailable; None if the destination answered the last one."""
        return self._circuit.unavailable_since

    def may_be_down(self, grace: float) -> bool:
        """Return True if nothing was delivered since the circuit opened, or since an attempt was unavailable.

        For ``grace`` seconds this holds after any other failure too. By then another attempt shows what it means.
        """
        if self._circuit.state != "closed" or self._circuit.unavailable_since is not None:
            return True
        since = self._circuit.failing_since
        return since is not None and time.monotonic() - since < grace

    def retry_delay(self) -> float:
        """Return the seconds until the next attempt of an event that was unavailable."""
        return self._circuit.retry_delay(time.monotonic())

    @property
    def failures(self) -> int:
        """The number of failures that counted."""
        return self._circuit.failures

    @property
    def last_error(self) -> str | None:
        """The last error that counted as one of the destination."""
        return self._circuit.last_error

    async def admit(self) -> Permit:
        """Wait until a call may be sent.

        The outcome of a probe must be reported, or that it is ``unused``.
        """
        async with self._turn:
            while (seconds := self._admission_delay()) > 0.0:
                self._state_changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._state_changed.wait()
            return Permit(self._circuit.term, not self.closed)

    def admit_at_once(self) -> Permit | None:
        """Return a permit if the circuit is closed, or None if the caller has to wait."""
        if self.handing_over or not self.closed:
            return None
        return Permit(self._circuit.term, probe=False)

    def _admission_delay(self) -> float:
        if self.handing_over or not self._may_send():
            return BLOCKED_POLL_SECONDS
        return self._circuit.admission_delay(time.monotonic())

    def probe_now(self) -> None:
        """Admit the next probe without waiting, if the circuit is open.

        A destination that is gone is left alone until its sink is paused.
        """
        if self.gone is None and self._circuit.probe_now():
            self._state_changed.set()

    def begin_handover(self) -> None:
        """Admit no call any more, since the session ends."""
        self.handing_over = True

    def holds(self, permit: Permit) -> bool:
        """Return True if the circuit is closed and has been since ``permit`` was given."""
        return self.closed and permit.term == self._circuit.term

    def delivered(self, permit: Permit) -> None:
        """Record that the destination accepted an event."""
        before = self._circuit.state
        self._circuit.delivered(permit.term)
        if self._circuit.state != before and self.closed:
            self._wake()

    def answered(self, permit: Permit) -> None:
        """Record that the destination answered an event that has failed before: it is not down."""
        self._circuit.answered(permit.term)

    def failed(self, event_id: int, reason: str, permit: Permit) -> bool:
        """Record that the destination answered an event with a failure. Several of these open the circuit.

        Return True if the failure is the event's: the circuit was closed, or the event is a probe that was answered in
        this way before. Otherwise it is the destination's, as far as is known.
        """
        repeated = permit.term == self._circuit.term and event_id in self._circuit.refused_probes
        counts = repeated or self.holds(permit)
        self._circuit.failed(event_id, reason, time.monotonic(), permit.term)
        self._wake()
        return counts

    def unavailable(
        self, event_id: int, verdict: Unavailable, permit: Permit, *, at_once: bool, retry_after: float
    ) -> bool:
        """Record that the destination is down or throttles.

        Return True if this opened the circuit.
        """
        at_once = at_once or verdict.throttled or verdict.gone
        retry_after = max(retry_after, GONE_SECONDS) if verdict.gone else retry_after
        opened = self._circuit.unavailable(
            event_id, verdict.reason, time.monotonic(), permit.term, at_once=at_once, retry_after=retry_after
        )
        if verdict.gone:
            self.gone = verdict.reason
        self._wake()
        return opened

    def unused(self, permit: Permit) -> None:
        """Return a probe that was not needed."""
        self._circuit.unused(permit.term)
        self._state_changed.set()

    def forget_gone(self) -> None:
        """Forget that the destination is gone, once the sink is paused."""
        self.gone = None

    def _wake(self) -> None:
        self._state_changed.set()
        self._changed.set()
