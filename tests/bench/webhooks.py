"""Measure the webhooks that one process delivers, compared with bare HTTP libraries in the same run.

usage: python -m tests.bench.webhooks [--seconds 3] [--rounds 3]

The receiver is a separate process with one port per host. Every row sends the same headers and body and reads the whole
answer. The rows take turns; each figure is the median of the rounds. `cpu` is the client's processor time per request,
the figure that depends least on other load; `ratio` compares it with bare aiohttp.

- sink: `WebhookSink.deliver`, signature and verdict included
- queue: the same behind a `PostingSink`, whose calls a thread of its own hands over and takes, as a relay does
- client: `PooledClient.post`
- aiohttp: one `ClientSession` for each host, nothing around it
- httpx: one `httpx.AsyncHTTPTransport` (over httpcore) for each host, without the client layer
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass

import aiohttp
import httpx
from yarl import URL

from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.formats import signatures
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.webhook import Credentials, Endpoint, WebhookSink
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.connector import Connector
from outbox_relay.sinks.webhook.http_client import Response
from tests.support.receiver.signatures import SECRET

BODY = b'{"id":1,"note":"' + b"x" * 983 + b'"}'
HEADERS = [
    ("webhook-id", "019a0000-0000-7000-8000-000000000001"),
    ("webhook-timestamp", "1900000000"),
    ("webhook-signature", "v1," + "g" * 43 + "="),
    ("idempotency-key", "019a0000-0000-7000-8000-000000000001"),
    ("content-type", "application/json"),
    ("user-agent", "outbox-relay"),
    ("accept", "*/*"),
    ("accept-encoding", "identity"),
    ("outbox-type", "order.created"),
    ("outbox-attempt", "1"),
    ("outbox-key", "k"),
]
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok"
LONG_SECONDS = 30.0
PERCENTILE = 0.99

Post = Callable[[], Awaitable[object]]
Make = Callable[[AsyncExitStack, str, int], Awaitable[Post]]


@dataclass(frozen=True)
class Load:
    """`each` concurrent requests to each of `hosts`, which answer after `delay_seconds`."""

    name: str
    hosts: int
    each: int
    delay_seconds: float


LOADS = (
    Load("1 host, 64 under way, answers at once", 1, 64, 0.0),
    Load("100 hosts, 500 under way, answer at once", 100, 5, 0.0),
    Load("100 hosts, 500 under way, answer after 50 ms", 100, 5, 0.05),
)


@dataclass(frozen=True)
class Figures:
    """Requests per second, processor time per request, and 99th percentile of the response time."""

    rate: float
    cpu_us: float
    p99_ms: float


async def sink(stack: AsyncExitStack, url: str, connections: int) -> Post:
    """Prepare the sink of the relay."""
    made = WebhookSink(
        "bench",
        Endpoint(url, lambda _: None),
        Credentials([signatures.parse_key(SECRET)]),
        timeout_seconds=LONG_SECONDS,
        max_in_flight=connections,
    )
    await made.open()
    stack.push_async_callback(made.close)
    batch = [an_event(payload=BODY)]

    async def post() -> None:
        assert await made.deliver(batch, time.monotonic() + LONG_SECONDS) == [DELIVERED]

    return post


async def client(stack: AsyncExitStack, url: str, _connections: int) -> Post:
    """Prepare the HTTP client of the relay."""
    connector = Connector(Endpoint(url, lambda _: None))
    made = PooledClient(url, connector)
    stack.callback(connector.reset)

    async def post() -> None:
        found = await made.post(HEADERS, BODY, LONG_SECONDS)
        assert isinstance(found, Response), found

    return post


async def bare_aiohttp(stack: AsyncExitStack, url: str, connections: int) -> Post:
    """Prepare a session with a total timeout, like that of the relay."""
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=LONG_SECONDS),
            auto_decompress=False,
        )
    )
    target = URL(url)

    async def post() -> None:
        async with session.post(target, data=BODY, headers=HEADERS, allow_redirects=False) as answer:
            await answer.read()

    return post


async def bare_httpx(stack: AsyncExitStack, url: str, connections: int) -> Post:
    """Prepare a transport over httpcore, with its timeouts for each read."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=4)
    made = await stack.enter_async_context(httpx.AsyncHTTPTransport(limits=limits))
    target = httpx.URL(url)
    each = dict.fromkeys(("connect", "read", "write", "pool"), LONG_SECONDS)

    async def post() -> None:
        request = httpx.Request("POST", target, headers=HEADERS, content=BODY, extensions={"timeout": each})
        response = await made.handle_async_request(request)
        await response.aread()
        await response.aclose()

    return post


ROWS: dict[str, Make] = {"sink": sink, "client": client, "aiohttp": bare_aiohttp, "httpx": bare_httpx}


async def measure(make: Make, urls: Sequence[str], load: Load, seconds: float) -> Figures:
    """Keep the requests of `load` in flight for `seconds`, after all connections are established."""
    async with AsyncExitStack() as stack:
        posts = [await make(stack, url, load.each) for url in urls]
        await asyncio.gather(*(post() for post in posts for _ in range(load.each)))
        took: list[float] = []
        end = time.monotonic() + seconds

        async def one_after_the_other(post: Post) -> None:
            now = time.monotonic()
            while now < end:
                began = now
                await post()
                now = time.monotonic()
                took.append(now - began)

        began, cpu = time.monotonic(), time.process_time()
        await asyncio.gather(*(one_after_the_other(post) for post in posts for _ in range(load.each)))
        lasted, spent = time.monotonic() - began, time.process_time() - cpu
    took.sort()
    return Figures(len(took) / lasted, spent / len(took) * 1e6, took[int(len(took) * PERCENTILE)] * 1e3)


@contextmanager
def receiver(load: Load) -> Generator[list[str]]:
    """Start a receiver process and yield its URLs."""
    command = [sys.executable, "-m", "tests.bench.webhooks", "--receive", str(load.hosts), str(load.delay_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield [f"http://127.0.0.1:{port}/hooks" for port in process.stdout.readline().split()]
        process.terminate()


class AnsweringProtocol(asyncio.Protocol):
    """Answers each request after a delay."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay = delay_seconds
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a complete request."""
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]):
            return
        self._read = b""
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, self._transport.write, ANSWER)
        else:
            self._transport.write(ANSWER)


async def receive(hosts: int, delay_seconds: float) -> None:
    """Listen on `hosts` ports, print them, and answer until the process ends."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: AnsweringProtocol(delay_seconds), "127.0.0.1", 0, backlog=1024)
        for _ in range(hosts)
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def median(figures: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    columns = zip(*((each.rate, each.cpu_us, each.p99_ms) for each in figures), strict=True)
    return Figures(*(statistics.median(column) for column in columns))


def table(load: Load, found: dict[str, list[Figures]]) -> None:
    """Print the rows of a load. A ratio is the median of the ratios of all rounds."""
    print(f"\n{load.name}\n{'':10} {'requests/s':>11} {'ratio':>6} {'cpu us':>8} {'ratio':>6} {'p99 ms':>8}")
    for name, figures in found.items():
        middle = median(figures)
        beside = list(zip(figures, found["aiohttp"], strict=True))
        rate = statistics.median(own.rate / bare.rate for own, bare in beside)
        cpu = statistics.median(bare.cpu_us / own.cpu_us for own, bare in beside)
        print(f"{name:10} {middle.rate:11,.0f} {rate:6.2f} {middle.cpu_us:8,.0f} {cpu:6.2f} {middle.p99_ms:8,.0f}")


def main() -> None:
    """Measure and print, or run the receiver."""
    arguments = argparse.ArgumentParser(prog="python -m tests.bench.webhooks", description=__doc__)
    arguments.add_argument("--seconds", type=float, default=3.0)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--receive", nargs=2, metavar=("HOSTS", "DELAY"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.receive:
        asyncio.run(receive(int(given.receive[0]), float(given.receive[1])))
        return
    logging.disable(logging.INFO)
    for load in LOADS:
        found: dict[str, list[Figures]] = {name: [] for name in ROWS}
        with receiver(load) as urls:
            for _ in range(given.rounds):
                for name, make in ROWS.items():
                    found[name].append(asyncio.run(measure(make, urls, load, given.seconds)))
        table(load, found)


if __name__ == "__main__":
    main()
