"""A TCP proxy on the loopback address that a test can cut, mute, or make lose connections without a word."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from tests.support import ports
from tests.support.listening import refuse_more

CHUNK_BYTES = 65_536
STEP_SECONDS = 10


class Proxy:
    """Passes bytes between its own port and `target`, a port of the loopback address, from a thread of its own."""

    def __init__(self) -> None:
        self.port = ports.free_port()
        self.target = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], _Passage] = {}
        self.mute = False
        """While true what the target answers is thrown away; connections that lost an answer are of no use any more."""
        self.swallowing = False
        """While true new connections are accepted and never reach the target."""
        self.delay = 0.0
        """Seconds by which everything that the target answers is late."""
        self.forgets_after = math.inf
        """Seconds without a byte after which a connection is lost, as by a load balancer that does not say so."""

    def __enter__(self) -> Self:
        self._thread.start()
        self.restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"{ports.LOOPBACK}:{self.port}"

    @property
    def connections(self) -> int:
        """The number of connections that neither end has closed."""
        return len(self._connections)

    def cut(self) -> None:
        """End every connection and refuse new ones."""
        self._run(self._cut())

    def restore(self) -> None:
        """Take connections again."""
        self._run(self._listen())

    def blackhole(self) -> int:
        """Lose every connection there is: nothing passes any more, and neither end is told when the other closes.

        Returns how many. New connections pass. The kernel still acknowledges what the ends send, so that neither
        keepalives nor TCP_USER_TIMEOUT show anything: only who waits for an answer with a deadline finds out.
        """
        return self._run(self._lose())

    def bury(self) -> None:
        """End the connections that were lost, as their peers would find when the network is back."""
        self._run(self._end([task for task, passage in self._connections.items() if passage.lost]))

    def _run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(STEP_SECONDS)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, ports.LOOPBACK, self.port)

    async def _cut(self) -> None:
        if self._server is not None:
            await refuse_more(self._server)
            self._server = None
        await self._end(list(self._connections))

    async def _lose(self) -> int:
        for passage in self._connections.values():
            passage.lost = True
        return len(self._connections)

    async def _end(self, connections: list[asyncio.Task[None]]) -> None:
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    def _is_lost(self, passage: "_Passage") -> bool:
        """Return True if nothing passes any more, at the time of a byte."""
        now = time.monotonic()
        passage.lost = passage.lost or now - passage.used_at > self.forgets_after
        passage.used_at = now
        return passage.lost

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = passage = _Passage(self.swallowing)
        writers = [writer]
        # A cancelled task would be reported as an error of the server; here it is how a connection ends.
        with contextlib.suppress(asyncio.CancelledError, OSError):
            if passage.lost:
                await asyncio.Event().wait()
            to_reader, to_writer = await asyncio.open_connection(ports.LOOPBACK, self.target)
            writers.append(to_writer)
            pumps = {
                asyncio.ensure_future(_pump(reader, to_writer, lambda: self._is_lost(passage), lambda: 0.0)),
                asyncio.ensure_future(
                    _pump(to_reader, writer, lambda: self._is_lost(passage) or self.mute, lambda: self.delay)
                ),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                if passage.lost:
                    await asyncio.Event().wait()
            finally:
                for pump in pumps:
                    pump.cancel()
        for end in writers:
            end.transport.abort()
        del self._connections[connection]


class _Passage:
    """One connection through the proxy."""

    def __init__(self, lost: bool) -> None:
        self.lost = lost
        self.used_at = time.monotonic()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mute: Callable[[], bool], delay: Callable[[], float]
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            if not mute():
                await asyncio.sleep(delay())
                writer.write(data)
                await writer.drain()
