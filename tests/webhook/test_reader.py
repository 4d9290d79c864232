"""Responses, byte by byte: the same reading as h11, the same facts however they are cut, and bounds that hold."""

from __future__ import annotations

import pytest

from outbox_relay.sinks.webhook.response import BODY_BYTES, CHUNKS, HEAD_BYTES, NotHttp
from tests.webhook.fuzz import EMPTY, OK, RESPONSES, RULES, Reading, by_h11, by_us, compare, difference, read

STRICTER = {
    "a line of a head ends without CR": OK + b"content-length: 0\n\r\n",
    "the version is neither 1.0 nor 1.1": b"HTTP/2.0 200 OK\r\n\r\n",
    "a head has a length and an encoding": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length has more than 18 digits": OK + b"content-length: 1000000000000000000\r\n\r\n",
    "a head is too long": OK + b"x: " + b"y" * HEAD_BYTES + b"\r\n\r\n",
    "there are too many interim responses": b"HTTP/1.1 100 Go\r\n\r\n" * 33 + EMPTY,
}


def test_mutated_responses_are_read_as_h11_reads_them() -> None:
    """`python -m tests.webhook.fuzz 1000000` reads more of them."""
    found = compare(20_000, seed=1)
    assert found[""] > 15_000
    assert found.total() == 20_000


def test_every_rule_by_which_the_relay_is_stricter_is_used() -> None:
    assert {name: difference(response, by_us(response)) for name, response in STRICTER.items()} == {
        name: name for name in RULES
    }


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_a_response_in_two_pieces_is_the_same_response(response: bytes) -> None:
    whole = read(response)
    assert by_us(response) == by_h11(response)
    assert (whole.whole, whole.ended_exactly) == (True, True)
    for cut in range(1, len(response), 1 + len(response) // 99):
        cut_in_two = read(response[:cut], response[cut:])
        assert (cut_in_two.prefix, cut_in_two.headers()) == (whole.prefix, whole.headers())
    for extra in (b"\r\n", b"H", EMPTY):
        assert by_us(response + extra) == Reading(whole.status, bytes(whole.prefix), whole=True, reusable=False)


def test_bytes_that_are_no_response_are_refused_at_once_and_not_repeated() -> None:
    for response in (
        b"SSH-2.0",
        OK[:-2] + b"\nx: secret",
        OK + b"x: secret\0\r\n\r\n",
        OK + b"x: " + b"y" * HEAD_BYTES,
    ):
        with pytest.raises(NotHttp, match=r"^the response (is not|has a head longer)"):
            read(response)


@pytest.mark.parametrize("size", [BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1])
def test_a_body_is_read_up_to_its_bound(size: int) -> None:
    head = OK + b"content-length: %d\r\n\r\n" % size
    for pieces in ((head + b"x" * size,), (head, *[b"x" * 1000] * (size // 1000), b"x" * (size % 1000))):
        reader = read(*pieces)
        assert (reader.whole, reader.ended_exactly) == (size <= BODY_BYTES, size <= BODY_BYTES)


def test_chunks_in_one_piece_are_read_up_to_their_bound() -> None:
    head = OK + b"transfer-encoding: chunked\r\n\r\n"
    for chunks, whole in ((CHUNKS - 1, True), (CHUNKS, False)):
        assert read(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n").whole is whole
