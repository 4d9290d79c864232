"""Requests of a webhook: what an event becomes, whatever it holds."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from outbox_relay import __version__
from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.signatures import parse_key
from outbox_relay.sinks.webhook.request import Credentials, Mode, Request, RequestFormat, make_request

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOW = 1_800_000_000.75
SIGNED = Credentials([parse_key(SECRET)])


def an_event(**changes: Any) -> StoredEvent:
    """Return an event of the log."""
    uid = "019a0000-0000-7000-8000-000000000001"
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    event = StoredEvent(1, 0, uid, "order.created", "order-1", b'{"id": 1}', "application/json", None, None, at)
    return event._replace(**changes)


def made(
    event: StoredEvent, form: RequestFormat | None = None, credentials: Credentials = SIGNED, attempt: int = 1
) -> Request:
    """Return the request for an event."""
    return make_request(event, form or RequestFormat(), credentials, attempt=attempt, now=NOW)


def headers_of(
    event: StoredEvent, form: RequestFormat | None = None, credentials: Credentials = SIGNED
) -> dict[str, str]:
    """Return the headers of the request for an event, none of them twice."""
    headers = made(event, form, credentials).headers
    assert len({name.lower() for name, _ in headers}) == len(headers)
    return dict(headers)


def test_request_has_exactly_these_headers() -> None:
    event = an_event(headers=json.dumps({"traceparent": TRACE, "x-tenant": "t"}))
    found = dict(made(event, attempt=3).headers)
    assert found.pop("webhook-signature").startswith("v1,")
    assert found == {
        "webhook-id": event.uid,
        "webhook-timestamp": "1800000000",
        "idempotency-key": event.uid,
        "content-type": "application/json",
        "user-agent": f"outbox-relay/{__version__}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "outbox-type": "order.created",
        "outbox-key": "order-1",
        "outbox-attempt": "3",
        "traceparent": TRACE,
    }


@pytest.mark.parametrize("mode", ["none", "binary", "structured"])
@pytest.mark.parametrize("payload", [b"", b'{"b":1, "a": "Zo\xc3\xab \xe2\x80\xa8"}', b'"\\ud800"', "текст".encode()])
def test_what_is_sent_is_what_is_signed(mode: Mode, payload: bytes) -> None:
    now = time.time()
    found = make_request(an_event(payload=payload), RequestFormat(mode), SIGNED, attempt=1, now=now)
    Webhook(SECRET).verify(found.body, dict(found.headers), json_parse=False)
    assert dict(found.headers)["webhook-signature"] == found.signature
    if mode != "structured":
        assert found.body == payload


def test_every_key_that_has_not_ended_signs() -> None:
    ends = [datetime.fromtimestamp(at, UTC) for at in (NOW, NOW + 1)]
    keys = [parse_key(SECRET), parse_key(SECRET, ends[0]), parse_key(SECRET, ends[1])]
    assert len(made(an_event(), credentials=Credentials(keys)).signature.split(" ")) == 2


@given(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_key_is_percent_encoded_and_left_out_when_there_is_none(name: str | None) -> None:
    found = headers_of(an_event(key=name))
    if name is None:
        assert "outbox-key" not in found
    else:
        assert found["outbox-key"].isascii()
        assert unquote(found["outbox-key"], errors="strict") == name


def test_only_named_headers_of_the_event_are_passed_on() -> None:
    headers = {"X-Tenant": " t 1\t", "x-trace": "no", "x-city": "Zoë 100%", "X-TENANT": "second", "webhook-id": "evil"}
    found = headers_of(an_event(headers=json.dumps(headers)), RequestFormat(forward=frozenset(("x-tenant", "x-city"))))
    assert {name: value for name, value in found.items() if name.startswith("x-")} == {
        "x-tenant": "t 1",
        "x-city": "Zo%C3%AB 100%",
    }
    assert found["webhook-id"] == an_event().uid


@pytest.mark.parametrize("text", ["a\r\nb", "a\nx-forged: 1", "a\0b", "ä/b", "a/b\x7f"])
@pytest.mark.parametrize("field", ["content_type", "type"])
def test_what_cannot_stand_in_a_header_is_an_error(field: str, text: str) -> None:
    """Of the event, not of the destination: else it would be tried for as long as the log exists, and hold its key."""
    with pytest.raises(ValueError, match="not printable ASCII"):
        made(an_event(**{field: text}))


def test_binary_cloudevent_is_read_by_the_reference_library() -> None:
    event = an_event(type='50%"off"', headers=json.dumps({"traceparent": TRACE, "tracestate": "a=1, b=%2"}))
    found = made(event, RequestFormat("binary", "/shop?a=%20b"))
    read: Any = from_binary_event(HTTPMessage(dict(found.headers), found.body))
    assert (read.get_id(), read.get_source(), read.get_type()) == (event.uid, "/shop?a=%20b", '50%"off"')
    assert (read.get_time(), read.get_specversion()) == (event.created_at, "1.0")
    assert (read.get_extension("traceparent"), read.get_extension("tracestate")) == (TRACE, "a=1, b=%2")
    assert read.get_datacontenttype() == "application/json"
    assert (read.get_data(), found.body) == ({"id": 1}, event.payload)
