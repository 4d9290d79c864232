"""Responses, byte by byte: the same facts however they are cut, and bounds that hold."""

from __future__ import annotations

import asyncio

import pytest

from outbox_relay.sinks.webhook.response import BODY_BYTES, CHUNKS, HEAD_BYTES, NotHttp, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\n"
EMPTY = HEAD + b"content-length: 0\r\n\r\n"
RESPONSES = {
    "no body": EMPTY,
    "a body": HEAD + b"Date: now\r\ncontent-length: 4\r\n\r\nbody",
    "chunks": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\nx: y\r\n\r\n",
    "interim responses": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\n" + EMPTY,
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "no content with a length": b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 3\r\n\r\n",
    "the same length twice": HEAD + b"content-length: 1\r\nContent-Length: 1, 1\r\n\r\n1",
    "a header twice": HEAD + b"retry-after: 1\r\nRetry-After:\t2 \r\ncontent-length: 0\r\n\r\n",
    "bytes that are not ASCII": HEAD + b"location: /\xe9\r\ncontent-length: 0\r\n\r\n",
    "a kept connection": HEAD + b"Connection: Keep-Alive\r\ncontent-length: 0\r\n\r\n",
    "a long body": HEAD + b"content-length: 3000\r\n\r\n" + b"x" * 3000,
    "a folded line": HEAD + b"x: y\r\n z\r\ncontent-length: 0\r\n\r\n",
}
NOT_HTTP = {
    "a version": b"HTTP/2.0 200 OK\r\n\r\n",
    "another protocol": b"SSH-2.0",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "switching protocols": b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\n\r\n",
    "a line without CR": b"HTTP/1.1 200 OK\nx",
    "a blank before a colon": HEAD + b"content-length : 0\r\n\r\n",
    "a folded line without a header": HEAD + b" x: y\r\n\r\n",
    "a length and chunks": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
    "two chunkings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "another encoding": HEAD + b"transfer-encoding: gzip\r\n\r\n",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a header without a name": HEAD + b": x\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n",
    "a long header": HEAD + b"x: " + b"y" * HEAD_BYTES,
    "CR alone": HEAD + b"x: y\rz: 1\r\n\r\n",
    "NUL": HEAD + b"x: \0\r\n\r\n",
}


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


def facts(*pieces: bytes) -> tuple[object, ...]:
    """Return the facts of a response that comes in these pieces: status, headers, prefix, whole, ended exactly."""
    reader = ResponseReader(Pieces(pieces))

    async def read() -> None:
        assert await reader.read_head()
        await reader.read_body()

    asyncio.run(read())
    return reader.status, reader.headers(), bytes(reader.prefix), reader.whole, reader.ended_exactly


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_a_response_in_two_pieces_is_the_same_response(response: bytes) -> None:
    whole = facts(response)
    assert whole[3:] == (True, True)
    assert all(
        facts(response[:cut], response[cut:]) == whole for cut in range(1, len(response), 1 + len(response) // 99)
    )


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize("extra", [b"\r\n", b"H", EMPTY], ids=["a line", "a byte", "another response"])
def test_a_response_with_more_behind_it_ends_its_connection(response: bytes, extra: bytes) -> None:
    status, _, _, whole, ended_exactly = facts(response + extra)
    assert (status, whole, ended_exactly) == (facts(response)[0], True, False)


@pytest.mark.parametrize("response", NOT_HTTP.values(), ids=NOT_HTTP)
def test_bytes_that_are_no_response_are_refused_at_once_and_not_repeated(response: bytes) -> None:
    with pytest.raises(NotHttp) as refused:
        facts(response)
    assert not any(word in str(refused.value) for word in ("SSH", "upgrade", "x:", "h2c"))
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("end", [b"connection: close\r\n", b""], ids=["announced", "HTTP/1.0"])
def test_a_connection_that_was_not_promised_is_not_kept(end: bytes) -> None:
    version = b"1.1" if end else b"1.0"
    assert facts(b"HTTP/%b 200 OK\r\n%bcontent-length: 0\r\n\r\n" % (version, end))[3:] == (True, False)


@pytest.mark.parametrize(("length", "whole"), [(b"", True), (b"content-length: 9\r\n", False)], ids=["none", "cut"])
def test_the_end_of_the_connection_ends_a_body_without_a_length_and_no_other(length: bytes, whole: bool) -> None:
    assert facts(HEAD + length + b"\r\nbody")[2:4] == (b"body", whole)


@pytest.mark.parametrize("size", [BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1])
def test_a_body_is_read_up_to_its_bound(size: int) -> None:
    head = HEAD + b"content-length: %d\r\n\r\n" % size
    fits = size <= BODY_BYTES
    assert facts(head + b"x" * size)[3:] == (fits, fits)
    assert facts(head, *[b"x" * 1000] * (size // 1000), b"x" * (size % 1000))[3:] == (fits, fits)


def test_chunks_in_one_piece_are_read_up_to_their_bound() -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for chunks, whole in ((CHUNKS - 1, True), (CHUNKS, False)):
        assert facts(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")[3:] == (whole, whole)
