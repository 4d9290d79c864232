"""One end of the pipe between the relay and a worker process, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from outbox_relay.worker.frames import PIECE_BYTES, BadFrame, Frame, FrameReader, frame


def _ignore() -> None:
    """Do nothing."""


class Channel(asyncio.Protocol):
    """Sends items in as few frames as possible, and passes received frames to ``receive``.

    ``receive`` raises ``BadFrame`` for a frame that it does not know. ``end`` is called once, when the pipe has ended
    or such a frame has come, and ``resume`` when the other end reads again.
    """

    def __init__(
        self,
        receive: Callable[[Frame], None],
        end: Callable[[], None],
        reader: FrameReader,
        resume: Callable[[], None] = _ignore,
    ) -> None:
        self._receive = receive
        self._end = end
        self._reader = reader
        self._resume = resume
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._kind = ""
        self._items: list[bytes] = []
        self._bodies: list[bytes] = []
        self._bytes = 0
        self._flushes = False
        self.writable = True
        """False while the other end does not read what is sent."""

    def send(self, kind: str, item: bytes, body: bytes = b"") -> None:
        """Send an item, and its bytes. Without effect once the pipe has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._items and (kind != self._kind or self._bytes >= PIECE_BYTES):
            self.flush()
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush_in_turn)
        self._kind = kind
        self._items.append(item)
        if body:
            self._bodies.append(body)
        self._bytes += len(item) + len(body)

    def flush(self) -> None:
        """Send at once, and not in the next turn of the loop."""
        if self._items and self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._kind, self._items, self._bodies))
        self._drop()

    def close(self) -> None:
        """End the pipe, and drop what is not sent."""
        self._drop()
        if self._transport is not None:
            self._transport.abort()

    def _flush_in_turn(self) -> None:
        self._flushes = False
        self.flush()

    def _drop(self) -> None:
        self._items, self._bodies, self._bytes = [], [], 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)  # those of uvloop are no subclasses

    def data_received(self, data: bytes) -> None:
        """Read frames. What is no frame ends the pipe."""
        try:
            for received in self._reader.feed(data):
                self._receive(received)
        except BadFrame:
            self.close()

    def pause_writing(self) -> None:
        """Have senders wait."""
        self.writable = False

    def resume_writing(self) -> None:
        """Let senders continue."""
        self.writable = True
        self._resume()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Report the end."""
        self._end()
