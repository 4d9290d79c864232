"""The conversion of events to records, and of events to topics."""

import json
from typing import Any

import pytest

from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.records import ANY_PARTITION, RecordFormat

SOURCE = "/shop/orders"


def test_the_plain_format_is_detected() -> None:
    assert RecordFormat().plain
    for changed in (
        RecordFormat(partition_header="p"),
        RecordFormat(tombstones=True),
        RecordFormat(cloudevents="binary", source=SOURCE),
    ):
        assert not changed.plain


@pytest.mark.parametrize(("own", "partition"), [('{"p": "3"}', 3), ('{"p": "0"}', 0), ('{"q": "3"}', ANY_PARTITION)])
def test_a_header_names_the_partition_and_is_passed_on(own: str, partition: int) -> None:
    event = an_event(headers=own)
    value, found, headers = RecordFormat(partition_header="p").record(event)
    assert (value, found) == (event.payload, partition)
    assert headers == [
        ("id", event.uid),
        ("type", event.type),
        ("content-type", event.content_type),
        *json.loads(own).items(),
    ]


@pytest.mark.parametrize("wrong", ["", "-1", "1.0", "one", "٣", " 1", "9999999999", "+1"])
def test_a_wrong_partition_is_reported_without_its_value(wrong: str) -> None:
    with pytest.raises(ValueError, match="header p should be the number of a partition") as raised:
        RecordFormat(partition_header="p").record(an_event(headers=json.dumps({"p": wrong})))
    assert not wrong.strip() or wrong not in str(raised.value)


def test_an_empty_payload_is_a_tombstone_only_when_asked_for() -> None:
    assert RecordFormat(partition_header="p").record(an_event(payload=b""))[0] == b""
    assert RecordFormat(tombstones=True).record(an_event(payload=b""))[0] is None
    assert RecordFormat(tombstones=True).record(an_event(payload=b" "))[0] == b" "


def test_a_tombstone_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        RecordFormat(tombstones=True).record(an_event(None, payload=b""))


def test_binary_cloudevents_keep_the_payload_and_add_headers() -> None:
    event = an_event(headers='{"a": "1", "ce_id": "theirs", "ce_mine": "x"}')
    value, _, headers = RecordFormat(cloudevents="binary", source=SOURCE).record(event)
    found = dict(headers)
    assert value == event.payload
    assert len(found) == len(headers)
    assert (found["ce_id"], found["ce_type"], found["ce_source"]) == (event.uid, event.type, SOURCE)
    assert (found["ce_specversion"], found["content-type"]) == ("1.0", event.content_type)
    assert found["a"] == "1"
    assert "ce_mine" not in found
    assert "ce_time" in found


FORGED = {
    "ID": "forged", "id": "forged", "Type": "forged", "type": "forged", "Content-Type": "forged", "ce_id": "forged",
    "CE_SpecVersion": "forged", "ce_anything": "forged", "idx": "kept", "cex": "kept", "x-type": "kept",
}  # fmt: skip
FORMS = {
    "plain": RecordFormat(),
    "partition": RecordFormat(partition_header="p"),
    "binary": RecordFormat(cloudevents="binary", source=SOURCE),
    "structured": RecordFormat(cloudevents="structured", source=SOURCE),
    "tombstone": RecordFormat(tombstones=True, cloudevents="structured", source=SOURCE),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_event_does_not_forge_the_relays_headers(name: str) -> None:
    event = an_event(payload=b"" if name == "tombstone" else b"{}", headers=json.dumps(FORGED))
    headers = FORMS[name].record(event)[2]
    assert "forged" not in [value for _, value in headers]
    assert [key for key, value in headers if value == "kept"] == ["idx", "cex", "x-type"]
    assert [key.lower() for key, _ in headers].count("id") == 1
    assert (dict(headers)["id"], dict(headers)["type"]) == (event.uid, event.type)


def test_the_type_header_replaces_the_type_and_occurs_once() -> None:
    form = RecordFormat(type_header="type")
    assert not form.plain
    event = an_event(headers='{"type": "Zoë was here", "id": "forged", "a": "1"}')
    assert form.record(event)[2] == [
        ("id", event.uid),
        ("type", "Zoë was here"),
        ("content-type", event.content_type),
        ("a", "1"),
    ]
    assert dict(form.record(an_event())[2])["type"] == an_event().type


def test_structured_cloudevents_wrap_the_payload() -> None:
    event = an_event(payload=b'{"n": 1.10}', headers='{"a": "1"}')
    value, _, headers = RecordFormat(cloudevents="structured", source=SOURCE).record(event)
    assert value is not None
    wrapped: Any = json.loads(value)
    assert wrapped["data"] == {"n": 1.1}
    assert wrapped["id"] == event.uid
    assert dict(headers)["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert [name for name, _ in headers] == ["id", "type", "content-type", "a"]
