"""Responses, byte by byte: the same facts however they are cut, and bounds that hold."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.sinks.webhook.reader import BODY_BYTES, CHUNKS, HEAD_BYTES, HEADERS, NotHttp, ResponseReader

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
    "the same length twice": HEAD + b"content-length: 1\r\nContent-Length: 1\r\n\r\n1",
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
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n",
    "a long header": HEAD + b"x: " + b"y" * HEAD_BYTES,
    "many headers": HEAD + b"x: y\r\n" * (HEADERS + 1),
    "CR alone": HEAD + b"x: y\rz: 1\r\n\r\n",
    "NUL": HEAD + b"x: \0\r\n\r\n",
}


def facts(*pieces: bytes) -> tuple[object, ...]:
    """Return the facts of a response that comes in these pieces."""
    reader = ResponseReader()
    for piece in pieces:
        reader.feed(piece)
    return reader.status, reader.headers, bytes(reader.prefix), reader.whole, reader.ended, reader.ended_exactly


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_a_response_in_two_pieces_is_the_same_response(response: bytes) -> None:
    whole = facts(response)
    assert whole[3:] == (True, True, True)
    assert all(facts(response[:cut], response[cut:]) == whole for cut in range(1, len(response)))


STATUS_LINES = (
    *(HEAD, b"HTTP/1.1 404\r\n", b"HTTP/1.1 500 \r\n", b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 304 No\r\n"),
    *(b"HTTP/1.1 700 Odd\r\n", b"HTTP/1.1 100 Go on\r\n", b"HTTP/1.1 101 Switch\r\n", b"HTTP/1.0 200 OK\r\n"),
    *(b"HTTP/1.1 200  \t OK~\r\n", b"HTTP/1.1 200 \xe9\r\n", b"HTTP/1.1 200 \x7f\r\n", b"HTTP/1.1 2000 OK\r\n"),
)
LINES = (
    *(b"content-length: 0", b"Content-Length:2", b"content-length:\t2 ", b"content-length: 02", b"content-length: +2"),
    *(b"content-length: 2, 2", b"content-length: ", b"transfer-encoding: chunked", b"transfer-encoding: gzip"),
    *(b"connection: close", b"Connection: keep-alive", b"connection: Keep-Alive, close", b"connection:"),
    *(b"upgrade: h2c", b"retry-after: 1", b"Retry-After:  2\t ", b"date: a  b", b"location: \xe9", b"location: \x7f"),
    *(b"x: \0", b" folded", b"\tfolded", b": no name", b"no colon", b"a b: c", b"a : b", b"a\xe9: b", b"x: y\nz: 1"),
    b"x: y\rz",
    *(b"!#$%&'*+-.^_`|~09AZaz: token", b"(): no token", b"content-type: text/plain; charset=utf-8", b"x:"),
)
BODIES = (b"", b"ok", b"ok\r\n", b"0\r\n\r\n", b"2\r\nok\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n")


def reading(*pieces: bytes) -> tuple[object, ...]:
    """Return the facts of a response that comes in these pieces, or that it is none."""
    try:
        return facts(*pieces)
    except NotHttp:
        return ("refused",)


def assert_read_in_one_way(start: bytes, lines: list[bytes], body: bytes) -> None:
    """Compare a response that comes at once, which a pattern may read, with one that comes in two pieces."""
    data = start + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body
    assert reading(data) == reading(data[:1], data[1:]), data


@given(st.sampled_from(STATUS_LINES), st.lists(st.sampled_from(LINES), max_size=5), st.sampled_from(BODIES))
def test_a_response_at_once_is_read_as_one_in_pieces(start: bytes, lines: list[bytes], body: bytes) -> None:
    assert_read_in_one_way(start, lines, body)


def test_every_line_beside_a_length_is_read_in_one_way() -> None:
    for start, line, body in product(STATUS_LINES, LINES, BODIES):
        assert_read_in_one_way(start, [b"content-length: %d" % len(body), line], body)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
@pytest.mark.parametrize("extra", [b"\r\n", b"H", EMPTY], ids=["a line", "a byte", "another response"])
def test_a_response_with_more_behind_it_ends_its_connection(response: bytes, extra: bytes) -> None:
    status, _, _, whole, ended, ended_exactly = facts(response + extra)
    assert (status, whole, ended, ended_exactly) == (facts(response)[0], True, True, False)


@pytest.mark.parametrize("response", NOT_HTTP.values(), ids=NOT_HTTP)
def test_bytes_that_are_no_response_are_refused_at_once_and_not_repeated(response: bytes) -> None:
    with pytest.raises(NotHttp) as refused:
        facts(response)
    assert not any(word in str(refused.value) for word in ("SSH", "upgrade", "x:", "h2c"))
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("end", [b"connection: close\r\n", b""], ids=["announced", "HTTP/1.0"])
def test_a_connection_that_was_not_promised_is_not_kept(end: bytes) -> None:
    version = b"1.1" if end else b"1.0"
    assert facts(b"HTTP/%b 200 OK\r\n%bcontent-length: 0\r\n\r\n" % (version, end))[3:] == (True, True, False)


def test_the_end_of_the_connection_ends_a_body_without_a_length_and_no_other() -> None:
    for head, whole in ((HEAD + b"\r\n", True), (HEAD + b"content-length: 9\r\n\r\n", False)):
        reader = ResponseReader()
        reader.feed(head + b"body")
        assert (reader.ended, bytes(reader.prefix)) == (False, b"body")
        reader.feed_end()
        assert reader.whole is whole


@pytest.mark.parametrize("size", [BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1])
def test_a_body_is_read_up_to_its_bound(size: int) -> None:
    head = HEAD + b"content-length: %d\r\n\r\n" % size
    fits = size <= BODY_BYTES
    assert facts(head + b"x" * size)[3:] == (fits, True, fits)
    assert facts(head, *[b"x" * 1000] * (size // 1000), b"x" * (size % 1000))[3:] == (fits, True, fits)


def test_chunks_in_one_piece_are_read_up_to_their_bound() -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for chunks, whole in ((CHUNKS - 1, True), (CHUNKS, False)):
        assert facts(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")[3:] == (whole, True, whole)
