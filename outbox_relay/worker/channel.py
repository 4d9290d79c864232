"""One end of the pipe between the relay and a worker process, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outbox_relay.worker.frames import BadFrame, Frame, FrameReader


class Channel(asyncio.Protocol):
    """Sends frames, together if there are several in one turn of the loop, and passes received ones to ``receive``.

    ``receive`` raises ``BadFrame`` for a frame that it does not know. ``end`` is called once, when the pipe has ended
    or such a frame has come.
    """

    def __init__(self, receive: Callable[[Frame], None], end: Callable[[], None], reader: FrameReader) -> None:
        self._receive = receive
        self._end = end
        self._reader = reader
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def writable(self) -> asyncio.Event:
        """Set while the other end reads what is sent."""
        return self._writable

    def send(self, frame: bytes) -> None:
        """Send a frame. Without effect once the pipe has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame)

    def close(self) -> None:
        """End the pipe, and drop what is not sent."""
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.WriteTransport)  # noqa: S101 - a socket's can be written to
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read frames. What is no frame ends the pipe."""
        try:
            for frame in self._reader.feed(data):
                self._receive(frame)
        except BadFrame:
            self.close()

    def pause_writing(self) -> None:
        """Have senders wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Report the end."""
        self._writable.set()
        self._end()
