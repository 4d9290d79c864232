"""Read mutated responses with the webhook client's reader and with h11, and compare: same bytes, same verdict.

usage: python -m tests.webhook.fuzz COUNT [--seed NUMBER]

The reader may be stricter than h11 by one of ``RULES``. Any other difference is an error.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import h11

from outbox_relay.sinks.webhook.response import (
    BODY_BYTES,
    CHUNKS,
    HEAD_BYTES,
    INTERIM_RESPONSES,
    PREFIX_BYTES,
    NotHttp,
    ResponseReader,
)

OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = OK + b"content-length: 0\r\n\r\n"
RESPONSES = {
    "no body": EMPTY,
    "a body": OK + b"Date: now\r\ncontent-length: 4\r\n\r\nbody",
    "chunks": OK + b"transfer-encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\nx: y\r\n\r\n",
    "interim responses": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\n" + EMPTY,
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "no content with a length": b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 3\r\n\r\n",
    "the same length twice": OK + b"content-length: 1\r\nContent-Length: 1, 1\r\n\r\n1",
    "a header twice": OK + b"retry-after: 1\r\nRetry-After:\t2 \r\ncontent-length: 0\r\n\r\n",
    "bytes that are not ASCII": OK + b"location: /\xe9\r\ncontent-length: 0\r\n\r\n",
    "a kept connection": OK + b"Connection: Keep-Alive\r\ncontent-length: 0\r\n\r\n",
    "a long body": OK + b"content-length: 3000\r\n\r\n" + b"x" * 3000,
    "a folded line": OK + b"x: y\r\n z\r\ncontent-length: 0\r\n\r\n",
}
"""Whole responses after which the connection may be kept."""
SEEDS = (
    *RESPONSES.values(),
    b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    OK + b"connection: keep-alive, Close\r\ncontent-length: 2\r\n\r\nok",
    OK + b"\r\nuntil the end",
    OK + b"transfer-encoding: chunked\r\n\r\nA;name=value\r\n0123456789\r\n00\r\n\r\n",
)
TOKENS = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b";", b",", b"\0", b"\v", b"\f", b"\xff", b"0", b"1", b"9", b"f"),
    *(b"content-length: 2\r\n", b"Content-Length:2 , 2\r\n", b"content-length: -1\r\n", b"content-length", b"1" * 19),
    *(b"transfer-encoding: chunked\r\n", b"Transfer-Encoding: Chunked\r\n", b"transfer-encoding: gzip\r\n", b"chunked"),
    *(b"connection: close\r\n", b"connection: x, close ,y\r\n", b"connection: closed\r\n", b"x: y\r\n", b" z\r\n"),
    *(
        b"HTTP/1.1 ",
        b"HTTP/1.0 ",
        b"HTTP/2.0 ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 No\r\n\r\n",
        OK,
        EMPTY,
    ),
    *(b"2\r\nok\r\n", b"2;x=y\r\nok\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"F" * 16, b"\r\n\r\n"),
)


class Reading(NamedTuple):
    """A response: whether its body is whole, and whether the connection may carry another exchange."""

    status: int
    prefix: bytes
    whole: bool
    reusable: bool


class Pieces:
    """A source whose bytes come in pieces, before the connection ends."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self.buffer = bytearray()
        self._pieces = list(pieces)

    async def more(self) -> bool:
        """Add the next piece."""
        if not self._pieces:
            return False
        self.buffer += self._pieces.pop(0)
        return True


def read(*pieces: bytes) -> ResponseReader:
    """Return the reader of a response that comes in these pieces. Raises NotHttp, and EOFError if a head is missing."""
    source = Pieces(pieces)
    reader = ResponseReader(source.buffer, source.more)

    async def whole() -> None:
        if not await reader.read_head():
            raise EOFError
        await reader.read_body()
        while await source.more():  # what follows the response, and ends the connection
            pass

    _run(whole())
    return reader


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("the reader waited")


def by_us(*pieces: bytes) -> Reading | None:
    """Return the reading of the relay; None if that is no response."""
    try:
        reader = read(*pieces)
    except (NotHttp, EOFError):
        return None
    return Reading(reader.status, bytes(reader.prefix), reader.whole, reader.ended_exactly)


def by_h11(response: bytes) -> Reading | None:
    """Return the reading of h11; None if that is no response."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * HEAD_BYTES)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(response)
    status, body, whole, ended = 0, b"", False, False
    try:
        while not whole:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(b"")
                ended = True
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                whole = isinstance(event, h11.EndOfMessage)
                if not whole and not isinstance(event, h11.InformationalResponse):
                    break
    except h11.RemoteProtocolError:
        pass
    reusable = whole and not ended and connection.their_state is h11.DONE and not connection.trailing_data[0]
    return Reading(status, body[:PREFIX_BYTES], whole, reusable) if status else None


class Parts(NamedTuple):
    """A response as h11 divides it: all heads up to that of the response, and the rest."""

    heads: list[bytes]
    body: bytes


def _parts(response: bytes) -> Parts:
    heads: list[bytes] = []
    while (end := re.search(rb"\n\r?\n", response)) is not None:
        heads.append(response[: end.end()])
        response = response[end.end() :]
        if not re.match(rb"HTTP/[0-9]\.[0-9] 1", heads[-1]):
            break
    return Parts(heads, response)


def _in_a_head(pattern: bytes) -> Callable[[Parts], bool]:
    compiled = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    return lambda parts: any(compiled.search(head) for head in parts.heads)


_has_length, _has_encoding = _in_a_head(rb"^content-length:"), _in_a_head(rb"^transfer-encoding:")
RULES: dict[str, Callable[[Parts], bool]] = {
    "a line of a head ends without CR": _in_a_head(rb"(?<!\r)\n"),
    "the version is neither 1.0 nor 1.1": _in_a_head(rb"\AHTTP/(?!1\.[01])"),
    "a head has a length and an encoding": lambda parts: any(
        _has_length(Parts([head], b"")) and _has_encoding(Parts([head], b"")) for head in parts.heads
    ),
    "a length has more than 18 digits": _in_a_head(rb"^content-length:.*[0-9]{19}"),
    "a head is too long": lambda parts: any(len(head) > HEAD_BYTES for head in parts.heads),
    "there are too many interim responses": lambda parts: len(parts.heads) > INTERIM_RESPONSES + 1,
}
"""Responses that are none to the relay, whatever h11 makes of them."""
BODY_RULES: dict[str, Callable[[Parts], bool]] = {
    "a trailer has a header that frames": lambda parts: (
        re.search(rb"(?im)^(content-length|transfer-encoding|connection):", parts.body) is not None
    ),
    "a line of a trailer ends without CR": lambda parts: re.search(rb"(?<!\r)\n", parts.body) is not None,
    "the size of a chunk has more than 15 digits": lambda parts: re.search(rb"[0-9A-Fa-f]{16}", parts.body) is not None,
    "the body is too long": lambda parts: len(parts.body) > BODY_BYTES,
    "the line of a chunk is too long": lambda parts: (
        re.search(rb";[^\n]{%d}" % (PREFIX_BYTES - 99), parts.body) is not None
    ),
    "there are too many chunks": lambda parts: parts.body.count(b"\r\n") > CHUNKS,
}
"""Bodies that are not whole to the relay, so that their connection is not kept; the status decides all the same."""


def difference(response: bytes, ours: Reading | None) -> str:
    """Return the rule by which the relay's reading is stricter than that of h11; empty if both are the same.

    Raises AssertionError for a difference that no rule names.
    """
    theirs = by_h11(response)
    if ours == theirs:
        return ""
    found = None
    if theirs is not None and ours is None:
        found = _rule(RULES, response)
    elif theirs is not None and ours is not None and ours.status == theirs.status and not ours.whole:
        alike = theirs.prefix.startswith(ours.prefix) or ours.prefix.startswith(theirs.prefix)
        found = _rule(BODY_RULES, response) if alike else None
    assert found is not None, f"{response!r} is {ours} to the relay and {theirs} to h11"
    return found


def _rule(rules: dict[str, Callable[[Parts], bool]], response: bytes) -> str | None:
    parts = _parts(response)
    return next((name for name, holds in rules.items() if holds(parts)), None)


def mutations(count: int, seed: int) -> Iterator[tuple[bytes, int]]:
    """Yield that many responses, nearly all of them broken, and a place to cut each into two pieces."""
    noise = random.Random(seed)
    for _ in range(count):
        response = bytearray(noise.choice(SEEDS))
        for _ in range(noise.choice((1, 1, 2, 3, 5))):
            _mutate(response, noise)
        yield bytes(response), noise.randrange(len(response) + 1)


def _mutate(response: bytearray, noise: random.Random) -> None:
    lines = [0, *(found.end() for found in re.finditer(rb"\n", response))]
    at = noise.choice(lines) if noise.random() < 0.5 else noise.randrange(len(response) + 1)
    end = min(len(response), at + noise.choice((1, 1, 2, 4, 16)))
    match noise.randrange(6):
        case 0:
            del response[at:end]
        case 1:
            response[at:at] = response[at:end]
        case 2:
            response[at:end] = noise.randbytes(end - at)
        case 3:
            response[at:] = noise.choice(SEEDS)
        case _:
            response[at:at] = noise.choice(TOKENS)


def compare(count: int, seed: int) -> Counter[str]:
    """Read that many responses both ways and return how many differ by each rule. Raises AssertionError."""
    found: Counter[str] = Counter()
    for response, cut in mutations(count, seed):
        found[difference(response, by_us(response[:cut], response[cut:]))] += 1
    return found


def main() -> None:
    """Compare and print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.webhook.fuzz", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = compare(options.count, options.seed)
    lines = [f"{found.pop('', 0):12,} read alike", *(f"{n:12,} {rule}" for rule, n in found.most_common())]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
