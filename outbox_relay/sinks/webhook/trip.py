"""What has become of one request so far: noted by those who carry it, read by who has to say how it ended."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from outbox_relay.sinks.webhook.wire import Wire


class NotConnected(httpx.ConnectError):
    """No connection was made, so that nothing was sent. ``code`` is the word for it; ``reason`` is fit for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason

    def again(self) -> NotConnected:
        """The same once more: one exception that is raised twice would collect the tracebacks of both."""
        return NotConnected(self.code, self.reason)


class Withdrawn(httpx.ConnectError):
    """The request was called back before it was sent."""


class Disconnected(httpx.RemoteProtocolError):
    """The connection was closed before the answer was complete."""


class Trip:
    """One request's way. Times are values of ``time.monotonic()``."""

    __slots__ = (
        *("began", "dialled", "ended", "first_byte", "fresh", "phase", "prefix", "response"),
        *("sent_at", "steps", "until", "whole", "wire", "withdrawn", "_since"),
    )

    def __init__(self, until: float = math.inf) -> None:
        self.began = self._since = time.monotonic()
        self.until = until
        """When it must have been sent: it is not from then on."""
        self.fresh = False
        """Whether it must go over a new connection."""
        self.withdrawn = False
        """Whether it was called back."""
        self.response: httpx.Response | None = None
        """Its answer, once the head is complete."""
        self.ended = False
        """Whether the whole answer came with its head."""
        self.prefix = bytearray()
        """The beginning of the answer's body."""
        self.whole = False
        """Whether the body came to its end."""
        self.start()

    def start(self) -> None:
        """Begin the way, or begin it anew."""
        self.phase = ""
        """What is being waited for: dns, connect, tls; empty when none of them."""
        self.steps: list[tuple[str, float]] = []
        self.dialled = False
        """Whether a connection was made for it."""
        self.sent_at: float | None = None
        """When there was a connection to send it over: it may have been processed since."""
        self.first_byte: float | None = None
        """When the first byte of an answer came."""
        self.wire: Wire | None = None

    def enter(self, phase: str) -> None:
        """Begin to wait for ``phase``."""
        self.phase = phase
        self._since = time.monotonic()

    def leave(self) -> None:
        """What was waited for is there."""
        self.steps.append((self.phase, time.monotonic() - self._since))
        self.phase = ""

    def told(self) -> tuple[tuple[str, float], ...]:
        """The steps and their seconds, that of the first byte included."""
        if self.sent_at is None or self.first_byte is None:
            return tuple(self.steps)
        return (*self.steps, ("first_byte", self.first_byte - self.sent_at))
