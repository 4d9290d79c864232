"""Program that receives webhooks, answers immediately and counts requests.

To use little processor time, it evaluates only the length and the key of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from pathlib import Path

from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.bench.counter import Counter

ACCEPTED, REFUSED = 0, 1
"""Slots of the counter: requests answered with 200 and with 500."""
YES = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
NO = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nno"
BACKLOG = 1_024
FAILING = re.compile(rb"\r\noutbox-key: *k\d*0\r\n", re.IGNORECASE)
"""Matches one in ten keys of the benchmarks."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"


class CountingProtocol(asyncio.Protocol):
    """One connection; with `failing`, requests with keys that end in 0 are refused."""

    def __init__(self, counter: Counter, *, failing: bool) -> None:
        self._counter = counter
        self._failing = failing
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._read += data
        while (end := self._read.find(_END)) >= 0:
            head = self._read[: end + 2]
            length = _LENGTH.search(head)
            whole = end + len(_END) + (int(length[1]) if length else 0)
            if len(self._read) < whole:
                return
            self._read = self._read[whole:]
            refused = self._failing and FAILING.search(head) is not None
            self._counter.add(REFUSED if refused else ACCEPTED)
            self._transport.write(NO if refused else YES)


async def serve(port: int, counter: Counter, *, failing: bool) -> None:
    """Listen until SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    server = await loop.create_server(
        lambda: CountingProtocol(counter, failing=failing), LOOPBACK, port, backlog=BACKLOG
    )
    await stopping.wait()
    server.close()


def main() -> int:
    """Run the receiver."""
    parser = argparse.ArgumentParser(prog="bench: receiver")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--counter", type=Path, required=True)
    parser.add_argument("--failing", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, Counter(arguments.counter), failing=arguments.failing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
