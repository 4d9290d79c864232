"""One request on its way: what has been sent and received, and why there is no response."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import time
from collections.abc import Generator
from contextlib import contextmanager

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.webhook.reader import NotHttp, ResponseReader

_EXHAUSTED = {
    errno.EADDRNOTAVAIL: "no local port or address is free",
    errno.EMFILE: "its limit of open files is reached",
    errno.ENFILE: "the machine's limit of open files is reached",
    errno.ENOBUFS: os.strerror(errno.ENOBUFS),
    errno.ENOMEM: os.strerror(errno.ENOMEM),
}


class ExchangeFailed(Exception):
    """No response came. ``code`` is the word for it; ``reason`` is a line for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class NotConnected(ExchangeFailed):
    """No connection was made, so that nothing was sent."""


class ConnectionLost(ExchangeFailed):
    """The connection ended before the head of the response was complete."""


class Exchange:
    """A request and what has come back. Times are values of ``time.monotonic()``.

    ``until`` is the ``lease_clock()`` value from which the request must not be written. ``limit`` ends the request;
    None if nothing does. ``phase`` is dns, connect or tls while that is waited for. ``sent_at`` is None unless the
    destination may have processed the request.
    """

    __slots__ = (
        *("began", "dialled", "first_byte", "force_new_connection", "limit", "phase", "response", "sent_at", "steps"),
        *("until", "withdrawn"),
    )

    def __init__(self, until: float = math.inf) -> None:
        self.began = time.monotonic()
        self.until = until
        self.limit: asyncio.Timeout | None = None
        self.withdrawn = False
        self.force_new_connection = False
        self._clear()

    def _clear(self) -> None:
        self.phase = ""
        self.steps: list[tuple[str, float]] = []
        self.dialled = False
        self.sent_at: float | None = None
        self.first_byte: float | None = None
        self.response = ResponseReader()

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        """Record how long a phase of making a connection takes; ``phase`` remains if it fails."""
        self.dialled = True
        self.phase = phase
        began = time.monotonic()
        yield
        self.steps.append((phase, time.monotonic() - began))
        self.phase = ""

    @contextmanager
    def unlimited(self) -> Generator[None]:
        """Let the time of this step not count toward ``limit``. The step has a limit of its own."""
        limit, clock = self.limit, asyncio.get_running_loop().time
        end = None if limit is None else limit.when()
        if limit is None or end is None:
            yield
            return
        began = clock()
        limit.reschedule(None)
        yield
        if not self.withdrawn:
            limit.reschedule(end + clock() - began)

    def start_again(self) -> None:
        """Forget the kept connection that was found closed; the next one must be new."""
        self._clear()
        self.force_new_connection = True

    def withdraw(self, now: float) -> None:
        """Forbid to write the request, and end it ``now``, in the time of the event loop."""
        self.withdrawn = True
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(now)

    def begin_sending(self) -> None:
        """Record that the request is written now. Nothing may be awaited between this call and the writing.

        Raises ExchangeFailed when the request was withdrawn or its lease has expired.
        """
        if self.withdrawn or lease_clock() >= self.until:
            self.withdrawn = True
            raise ExchangeFailed("withdrawn", "withdrawn before it was sent")
        self.sent_at = time.monotonic()

    def reject(self) -> None:
        """Record that the destination ended the connection without accepting the request."""
        self.sent_at = None

    def receive(self, data: bytes) -> None:
        """Read ``data``, which belongs to the response. Raises ExchangeFailed when that is not HTTP/1.1."""
        if self.first_byte is None:
            self.first_byte = time.monotonic()
        try:
            self.response.feed(data)
        except NotHttp as error:
            raise ExchangeFailed("protocol_error", str(error)) from None

    def timings(self) -> tuple[tuple[str, float], ...]:
        """Return the steps and their seconds, first_byte included."""
        if self.sent_at is None or self.first_byte is None:
            return tuple(self.steps)
        return (*self.steps, ("first_byte", self.first_byte - self.sent_at))


def exhausted(lack: str) -> NotConnected:
    """Return the fault of a relay that cannot connect for its own ``lack``, whatever the destination does."""
    return NotConnected("relay_exhausted", f"this relay cannot open another connection: {lack}")


def exhausted_by(number: int | None) -> NotConnected | None:
    """Return the fault of the relay that the error ``number`` of the operating system shows, or None."""
    if number is None or number not in _EXHAUSTED:
        return None
    return exhausted(f"{_EXHAUSTED[number]} ({errno.errorcode[number]})")
