"""A forward proxy on a real socket, which connects or refuses when asked by CONNECT."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.support.ports import LOOPBACK
from tests.support.receiver.answers import head

GOOD = head(200, reason="Connection established")


class ConnectProxy:
    """A proxy for which every name is this machine. It sends `answer`, and connects only after a 200.

    An empty `answer` is silence, and None ends the connection.
    """

    def __init__(self) -> None:
        self.port = 0
        self.answer: bytes | None = GOOD
        self.asked: list[str] = []
        """First lines of the requests, in order."""
        self.heads: list[dict[str, str]] = []
        """The headers that came with them, names in lower case."""

    @property
    def url(self) -> str:
        """Return the URL of the proxy."""
        return f"http://{LOOPBACK}:{self.port}"

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip("\r\n").split("\r\n")
            self.asked.append(first)
            self.heads.append(
                {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            )
            if self.answer is None:
                return
            writer.write(self.answer)
            if self.answer == GOOD:
                port = int(first.split(" ")[1].rpartition(":")[2])
                await _both_ways(reader, writer, *await asyncio.open_connection(LOOPBACK, port))
            else:
                await reader.read()


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    ways = [asyncio.ensure_future(_pass(reader, far_writer)), asyncio.ensure_future(_pass(far_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        far_writer.transport.abort()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()


@asynccontextmanager
async def proxying() -> AsyncGenerator[ConnectProxy]:
    """Run a proxy that listens."""
    proxy = ConnectProxy()
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        task = asyncio.ensure_future(proxy.accepted(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, LOOPBACK, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        for _ in range(5):
            await asyncio.sleep(0)  # aborted transports are closed in the next turns
