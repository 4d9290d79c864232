"""CloudEvents, as the reference library reads them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.cloudevents import CONTENT_TYPE, attributes, structured

SOURCE = "/shop/orders"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EMITTED = datetime(2026, 3, 1, 12, 30, 15, 250_000, timezone(timedelta(hours=2)))


def an_event(
    payload: bytes = b'{"id": 1}', content_type: str = "application/json", headers: str | None = None
) -> StoredEvent:
    """Return an event of the log."""
    uid = "019a0000-0000-7000-8000-000000000001"
    return StoredEvent(1, 0, uid, "order.created", "k", payload, content_type, headers, None, EMITTED)


def read(event: StoredEvent) -> Any:
    """Return the structured form as the reference library reads it."""
    return from_structured_event(HTTPMessage({"content-type": CONTENT_TYPE}, structured(event, SOURCE)))


@pytest.mark.parametrize("value", ["", "a\tb", "ключ", "\x7f"])
def test_trace_that_no_attribute_can_hold_is_left_out(value: str) -> None:
    assert "traceparent" not in attributes(an_event(headers=json.dumps({"traceparent": value})), SOURCE)


@pytest.mark.parametrize("headers", ["[]", "{", '{"a": 1}', "null", "[" * 100_000])
def test_invalid_headers_are_an_error_without_them(headers: str) -> None:
    for make in (attributes, structured):
        with pytest.raises(ValueError, match=r"^the event's headers are not a JSON object of strings$"):
            make(an_event(headers=headers), SOURCE)


def test_structured_form_is_read_by_the_reference_library() -> None:
    found = read(an_event(headers=json.dumps({"traceparent": TRACE})))
    assert (found.get_id(), found.get_source(), found.get_type()) == (an_event().uid, SOURCE, "order.created")
    assert found.get_time() == EMITTED.astimezone(UTC)
    assert found.get_datacontenttype() == "application/json"
    assert found.get_extension("traceparent") == TRACE
    assert found.get_data() == {"id": 1}


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=utf-8", "text/json", "application/vnd.shop.order+json"],
)
@pytest.mark.parametrize(
    "payload",
    [
        b'{"b": 1,  "a": [1.0, 1e400, "\\ud800"]}\n',
        '{"name": "Zoë 😀 \u2028"}'.encode(),
        b"0",
        b'"text"',
        b"1" * 5_000,
        b'{"a": 1, "a": 2}',
    ],
)
def test_json_is_in_the_structured_form_byte_for_byte(payload: bytes, content_type: str) -> None:
    made = structured(an_event(payload, content_type), SOURCE)
    assert made.endswith(b',"data":' + payload + b"}")
    # Not the reference library: it converts numbers, whose length Python limits.
    assert json.loads(made, parse_int=str)["data"] == json.loads(payload, parse_int=str)


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b'{}, "id": "other"', "application/json"),
        (b"NaN", "application/json"),
        (b"[Infinity]", "application/json"),
        (b"\xff\xfe1\x00", "application/json"),
        (b"\xef\xbb\xbf1", "application/json"),
        (b'"\xff"', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"1", "application/octet-stream"),
        (b"1", "application/jsonp"),
        (b"1", "text/plain; a=application/json"),
        (bytes(range(256)), "application/octet-stream"),
        ("ключ".encode(), "text/plain; charset=utf-8"),
    ],
)
def test_any_other_payload_is_there_in_base64(payload: bytes, content_type: str) -> None:
    found = read(an_event(payload, content_type))
    assert found.get_data() == payload
    assert found.get_datacontenttype() == content_type


@given(st.binary(max_size=300) | st.text(max_size=50).map(str.encode), st.text(max_size=20))
def test_payload_can_change_nothing_of_the_rest(payload: bytes, trace: str) -> None:
    event = an_event(payload, headers=json.dumps({"traceparent": trace}))
    whole = json.loads(structured(event, SOURCE))
    data = {name: whole.pop(name) for name in ("data", "data_base64") if name in whole}
    assert len(data) == 1
    assert whole == attributes(event, SOURCE) | {"datacontenttype": "application/json"}
