"""The test kit's matching: what a part of a payload is, and what a failure shows."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from outbox_relay.testing.matching import ANY, MOST_CHARS, MOST_SHOWN, differences, listed
from outbox_relay.testing.reading import EmittedEvent, events_of

ORDER = {
    "id": 7,
    "total": 12.5,
    "lines": [{"sku": "a", "count": 2}, {"sku": "b", "count": 1}],
    "paid": True,
    "note": None,
}


def event(payload: Any = None, **changes: Any) -> EmittedEvent:
    """Return an event of an order."""
    values: dict[str, Any] = {"type": "order.created", "key": "order-7", "headers": None, **changes}
    payload = ORDER if payload is None else payload
    return EmittedEvent(UUID(int=1), payload=payload, content_type="application/json", deliver_at=None, **values)


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        ({}, []),
        (ORDER, []),
        ({"id": 7}, []),
        ({"lines": [{"sku": "a"}, {"count": 1}]}, []),
        ({"note": None}, []),
        ({"total": 12}, ["payload.total: wanted 12, found 12.5"]),
        ({"absent": None}, ["payload.absent: wanted None, not there"]),
        ({"paid": 1}, ["payload.paid: wanted 1, found True"]),
        ({"id": True}, ["payload.id: wanted True, found 7"]),
        ({"lines": [{"sku": "a"}]}, ["payload.lines: wanted 1 elements, found 2"]),
        ({"lines": [{"sku": "b"}, {}]}, ["payload.lines[0].sku: wanted 'b', found 'a'"]),
        ({"id": {"x": 1}}, ["payload.id: wanted {'x': 1}, found 7"]),
        ({"id": 8, "note": 1}, ["payload.id: wanted 8, found 7", "payload.note: wanted 1, found None"]),
        (None, [f"payload: wanted None, found {ORDER!r}"[:200]]),
        ([7], [f"payload: wanted [7], found {ORDER!r}"[:200]]),
    ],
)
def test_a_part_of_a_payload_matches_and_the_first_difference_has_its_place(payload: Any, found: list[str]) -> None:
    assert [line[:200] for line in differences(event(), "order.created", ANY, payload, ANY)] == found


def test_a_failure_shows_the_closest_events_first_and_not_all_of_them() -> None:
    events = [event({"id": n}) for n in range(MOST_SHOWN + 3)]
    reasons = [differences(each, "order.created", ANY, {"id": 12}, ANY) for each in events]
    lines = listed(events, reasons).splitlines()
    assert lines[:3] == [
        "emitted:",
        "  order.created  key 'order-7'  payload {'id': 12}",
        "  order.created  key 'order-7'  payload {'id': 0}",
    ]
    assert lines[3] == "    payload.id: wanted 12, found 0"
    assert lines[-1] == "  and 3 more"
    assert listed([], []) == "no event was emitted"
    long = event("x" * 10_000)
    assert len(listed([long], [[]])) < MOST_CHARS + 100


@pytest.mark.parametrize(
    ("content_type", "stored", "payload"),
    [
        ("application/json", b'{"a":1}', {"a": 1}),
        ("application/cloudevents+json; charset=utf-8", b"[1]", [1]),
        ("application/json", b"{", b"{"),
        ("text/plain", b"1", b"1"),
    ],
)
def test_a_payload_of_json_is_decoded_and_any_other_is_bytes(content_type: str, stored: bytes, payload: Any) -> None:
    [found] = events_of([(str(UUID(int=3)), "t", None, memoryview(stored), content_type, '{"x": "1"}', None)])
    assert (found.payload, found.uid, found.headers) == (payload, UUID(int=3), {"x": "1"})
