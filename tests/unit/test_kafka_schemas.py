"""Schemas of events: payloads in the wire format, misfits, and the answers of a registry, without any secret."""

from __future__ import annotations

import base64
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.settings import KafkaSettings
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka import schemas as module
from outbox_relay.sinks.kafka.schemas import EventSchemas, SchemasUnavailable, Serializer
from tests.support.apicurio import AVRO, JSON_SCHEMA, protobuf
from tests.support.registry_server import RegistryServer

SECRET = "a-secret-of-the-event"
PREFIX = b"\x00\x00\x00\x00\x07"
"""Confluent's: a zero, and the id of the schema in four bytes."""
MESSAGE = b"\x02\x02"
"""Behind the prefix with Protobuf: the place of the message in its file, a list of one number, 1."""
SECONDS = 10.0


@pytest.fixture
def server() -> Generator[RegistryServer]:
    with RegistryServer() as running:
        running.register("avro-value", AVRO)
        running.register("json-value", JSON_SCHEMA, schemaType="JSON")
        file = base64.b64encode(protobuf().SerializeToString()).decode()
        running.register("protobuf-value", None, schemaType="PROTOBUF")
        running.schemas["protobuf-value"]["schema"] = file
        yield running


def schemas(server: RegistryServer, form: str = "avro", only: str | None = None, **registry: Any) -> EventSchemas:
    table = {
        "type": "kafka",
        "topic": "{type}",
        "producer": {"bootstrap.servers": "x:1"},
        "registry": {"url": server.url, "format": form, "records": {"order.created": "shop.Order"}, **registry},
    }
    return EventSchemas(KafkaSettings.model_validate(table).registry, only)


def serializer(found: EventSchemas, topic: str, seconds_ago: float = 0.0) -> Serializer | Refused | Unavailable:
    created_at = datetime.now(UTC) - timedelta(seconds=seconds_ago)
    return found.serializer(topic, an_event()._replace(created_at=created_at), SECONDS)


def encoded(found: EventSchemas, topic: str, payload: bytes) -> bytes:
    made = serializer(found, topic)
    assert isinstance(made, Serializer)
    return made.encode(topic, payload)


# -- payloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("avro", b"\x06\x02\x02x"),
        ("json", b'{ "n" : 3,  "note":"x"}'),
        ("protobuf", MESSAGE + b"\x08\x03\x12\x01x"),
    ],
)
def test_a_payload_that_fits_is_encoded_without_a_further_request(
    server: RegistryServer, form: str, value: bytes
) -> None:
    found = schemas(server, form)
    assert encoded(found, form, b'{ "n" : 3,  "note":"x"}') == PREFIX + value
    asked = len(server.paths)
    assert encoded(found, form, b'{ "n" : 3,  "note":"x"}') == PREFIX + value
    assert len(server.paths) == asked


MISFITS = [
    ("avro", f'{{"n": "{SECRET}"}}', "field shop.Order.n: ValidationError"),
    ("avro", '{"n": true}', "field shop.Order.n: ValidationError"),
    ("avro", f'{{"n": 1, "{SECRET}": 1}}', ": "),
    ("json", f'{{"n": "{SECRET}"}}', "properties/n/type: SerializationError"),
    ("json", f'{{"n": 1, "{SECRET}": 1}}', "additionalProperties: SerializationError"),
    ("protobuf", f'{{"n": "{SECRET}"}}', "field n: ParseError"),
    ("protobuf", f'{{"n": 1, "{SECRET}": 1}}', ": ParseError"),
    *(
        (form, text, ": ")
        for form in ("avro", "json", "protobuf")
        for text in (SECRET, "", "NaN", '{"n": 1e400}', "[" * 9999, f'{{"n": {"[" * 200}{"]" * 200}}}', "null")
    ),
]


@pytest.mark.parametrize(("form", "payload", "reason"), MISFITS)
def test_a_misfit_is_refused_with_its_place_and_without_its_values(
    server: RegistryServer, form: str, payload: str, reason: str
) -> None:
    with pytest.raises(ValueError, match="subject") as raised:
        encoded(schemas(server, form), form, payload.encode())
    assert reason in f"{raised.value}: "
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("referring", "reference"),
    [
        (
            {**AVRO, "fields": [{"name": "n", "type": "shop.Number"}]},
            {"type": "enum", "name": "shop.Number", "symbols": ["one"]},
        ),
        ({"properties": {"n": {"$ref": "number.json"}}}, {"enum": ["one"]}),
    ],
    ids=["avro", "json"],
)
def test_a_schema_may_refer_to_others(server: RegistryServer, referring: Any, reference: Any) -> None:
    form = "avro" if "fields" in referring else "json"
    name = "shop.Number" if form == "avro" else "number.json"
    references = [{"name": name, "subject": "number", "version": 1}]
    server.register("number", reference, schemaType=form.upper())
    server.register("orders-value", referring, schemaType=form.upper(), references=references)
    found = schemas(server, form)
    assert encoded(found, "orders", b'{"n": "one"}').startswith(PREFIX)
    with pytest.raises(ValueError, match="does not fit"):
        encoded(found, "orders", b'{"n": "two"}')


# -- the registry ------------------------------------------------------------------------------------------------------


def test_events_of_a_missing_subject_wait_until_it_is_there_or_they_are_late(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MISSING_SECONDS", 0.0)
    found = schemas(server, missing_seconds=0)
    waiting = schemas(server)
    first = serializer(waiting, "late", seconds_ago=9999)
    reason = (
        "subject late-value: the schema registry has no such subject, version or schema (HTTP status 404, code 40401)"
    )
    assert isinstance(first, Unavailable)
    assert (first.reason, first.part) == (reason, "subject late-value")
    assert serializer(found, "late", seconds_ago=1) == Refused(f"{reason}, for 0 s")
    only = schemas(server, only="late")
    assert serializer(only, "late") == Unavailable(reason), "the subject of all events is the destination"
    server.register("late-value", AVRO)
    assert isinstance(serializer(waiting, "late"), Serializer)
    assert isinstance(serializer(found, "late", seconds_ago=1), Serializer), "no event is refused by an old answer"


@pytest.mark.parametrize(
    "registered",
    [
        {"schemaType": "JSON"},
        {"schema": '{"type": "recrod"}'},
        {"ruleSet": {"domainRules": [{"name": "x", "kind": "TRANSFORM", "mode": "WRITE", "type": "CEL"}]}},
    ],
    ids=["another format", "no schema", "rules"],
)
def test_a_schema_that_cannot_be_used_is_missing(server: RegistryServer, registered: dict[str, Any]) -> None:
    server.register("odd-value", AVRO)
    server.schemas["odd-value"].update(registered)
    verdict = serializer(schemas(server), "odd")
    assert isinstance(verdict, Unavailable)
    assert verdict.reason.startswith("subject odd-value: ")


def test_a_silent_registry_makes_no_event_dead_and_known_schemas_stay_in_use(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MISSING_SECONDS", 0.0)
    monkeypatch.setattr(module, "CACHE_SECONDS", 0.0)
    found = schemas(server, missing_seconds=1)
    assert isinstance(serializer(found, "avro"), Serializer)
    assert isinstance(serializer(found, "gone"), Unavailable)
    server.status, server.body = 503, {"error_code": 50301, "message": SECRET}
    assert isinstance(serializer(found, "avro"), Serializer)
    assert isinstance(serializer(found, "gone", seconds_ago=9999), Unavailable)
    with pytest.raises(SchemasUnavailable, match=r"HTTP status 503, code 50301$"):
        serializer(found, "json")


ANSWERS: list[tuple[int, object, str]] = [
    (401, {"error_code": 40101, "message": SECRET}, "HTTP status 401, code 40101"),
    (404, {"error": SECRET}, "HTTP status 404: the answer is not that of a registry; is the path in url right?"),
    (302, b"", "HTTP status 302: the answer is not that of a registry; is the path in url right?"),
    (200, {"subject": "avro-value"}, "the answer is not that of a registry; is the path in url right?"),
]


@pytest.mark.parametrize(("status", "body", "reason"), ANSWERS)
def test_other_answers_are_an_outage_without_their_text(
    server: RegistryServer, status: int, body: object, reason: str
) -> None:
    server.status, server.body = status, body
    with pytest.raises(SchemasUnavailable) as raised:
        serializer(schemas(server), "avro")
    assert str(raised.value) == f"schema registry {server.url}: {reason}"


def test_a_registry_that_is_not_there_is_an_outage(server: RegistryServer) -> None:
    found = schemas(server, url="http://127.0.0.1:1/path")
    assert (
        found.check(lambda topic: topic, SECONDS) == "schema registry http://127.0.0.1:1: no answer: Connection refused"
    )
    assert schemas(server).check(lambda _: "avro", SECONDS) is None
    assert "subject nowhere-value: " in (schemas(server).check(lambda _: "nowhere", SECONDS) or "")


def test_the_password_is_sent_and_shown_nowhere(server: RegistryServer) -> None:
    found = schemas(server, user_info=f"relay:{SECRET}")
    assert isinstance(serializer(found, "avro"), Serializer)
    assert base64.b64decode((server.logins[0] or "")[6:]) == f"relay:{SECRET}".encode()
    server.status, server.body = 401, {"error_code": 40101, "message": f"no such user: {SECRET}"}
    with pytest.raises(SchemasUnavailable) as raised:
        serializer(found, "json")
    assert SECRET not in str(raised.value)
