"""The text kept of a response: harmless, without secrets and without the payload."""

from __future__ import annotations

import html
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.sinks.webhook.redaction import (
    ANSWER_CHARS,
    ECHO,
    ECHO_BYTES,
    REDACTED,
    echoes,
    readable,
    secrets_of_url,
)

SECRET = 'Bearer "hun/ter+2" <&>'


def shown(
    answer: bytes | str, *secrets: str, sent: bytes = b"", key: str | None = None, cut: bool = False
) -> str | None:
    """Return the text kept of a response to an event with this key."""
    prefix = answer.encode() if isinstance(answer, str) else answer
    return readable(prefix, secrets, sent, personal=[] if key is None else [key], cut=cut)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", None),
        (b"no such tenant", "no such tenant"),
        (b"a\x00b\r\n  c\td\x7f", "a b c d"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;x\x1b\\link \x1bM\x1b", "red link"),
        ("\x9b2Jc1 \u202eevil\u2028line".encode(), "c1 evil line"),
        (b"\xff\xfe\xc3(", "\ufffd\ufffd\ufffd("),
        ("Zoë 😀".encode(), "Zoë 😀"),
        (b"<script>alert(1)</script>", "<script>alert(1)</script>"),
    ],
)
def test_answer_becomes_one_harmless_line(answer: bytes, expected: str | None) -> None:
    assert shown(answer) == expected


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_whatever_was_answered_is_printable_and_bounded(answer: bytes) -> None:
    found = shown(answer * 20, SECRET)
    assert found is None or (len(found) <= ANSWER_CHARS and (found.isprintable() or "\ufffd" in found))


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        json.dumps(SECRET),
        json.dumps({"authorization": SECRET}).replace("/", "\\/"),
        html.escape(SECRET),
        quote(SECRET),
        quote(SECRET, safe=""),
        SECRET.replace(" ", " \n "),
        SECRET.replace("hun", "hun\x1b[0m"),
        SECRET + SECRET,
        SECRET.split()[1],
    ],
)
def test_secrets_do_not_show_in_any_spelling(written: str) -> None:
    found = shown(f"denied: {written}!", SECRET)
    assert found is not None
    assert "hun" not in found
    assert found.startswith("denied: ")
    assert REDACTED in found


@pytest.mark.parametrize("key", ["customer-1", "shop", "größe", "a b c", "x/y z"])
@pytest.mark.parametrize("before", ["", "key=", '{"key":"', "\\n", "\\u0022", "%20", "%3D", "id_", "<b>", "'", "ref:"])
def test_a_key_does_not_show_where_it_is_whole(key: str, before: str) -> None:
    for written in (key, quote(key, safe=""), json.dumps(key)[1:-1]):
        assert shown(f"unknown {before}{written}, and more", key=key) == f"unknown {before}{REDACTED}, and more"


PAYLOAD = json.dumps({"name": "Zoë Example", "card": "4111111111111111", "n": list(range(500))}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        PAYLOAD,
        b"cannot take " + PAYLOAD[5:21],
        b"cannot take " + PAYLOAD[-ECHO_BYTES:] + b"!",
        b"bad card 4111111111111111",
    ],
)
def test_answer_that_repeats_the_payload_is_left_out(answer: bytes) -> None:
    assert shown(answer, sent=PAYLOAD) == ECHO


@given(st.binary(max_size=120), st.binary(max_size=120), st.binary(max_size=40), st.integers(0, 40))
def test_repetition_is_found_as_by_looking_everywhere(sent: bytes, prefix: bytes, common: bytes, at: int) -> None:
    sent, prefix = sent[:at] + common + sent[at:], prefix[:at] + common + prefix[at:]
    if len(sent) < ECHO_BYTES:
        expected = len(sent) >= 4 and sent in prefix
    else:
        expected = any(sent[n : n + ECHO_BYTES] in prefix for n in range(len(sent) - ECHO_BYTES + 1))
    assert echoes(prefix, sent) == expected


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("https://h.example/hooks", {"/hooks"}),
        ("https://h.example/hooks?token=hunter2&x", {"/hooks?token=hunter2&x", "hunter2"}),
        ("https://h.example/services/T0123456789abcdef/B1", {"T0123456789abcdef"}),
    ],
)
def test_parts_of_a_url_that_may_be_tokens(url: str, secrets: set[str]) -> None:
    assert secrets <= secrets_of_url(url)
