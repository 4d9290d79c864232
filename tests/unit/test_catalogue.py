"""The catalogue without a database: declaring, serialising, and the documents."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from outbox_relay.admin.catalogue import document, load
from outbox_relay.catalogue import InvalidEvent, event
from outbox_relay.catalogue.conformity import PayloadValidator
from outbox_relay.catalogue.documents import asyncapi
from outbox_relay.emit_rows import Event, row_of, rows_of
from tests.support.command import inside
from tests.support.declared import (
    OrderCreated,
    OrderNamed,
    OrderPacked,
    OrderPaid,
    OrderReopened,
    Undeclared,
)

MODULE = "tests.support.declared"
ASYNCAPI = Path(__file__).parents[1] / "support" / "asyncapi" / "schema-3.0.0.json"
UID = UUID("01a1fe9a-cd39-7f81-9032-e812a3369897")
SECRET = "4929-1234"


def sent(instance: Any, **options: Any) -> tuple[str, Any, str | None]:
    """Return type, payload and key of the row of an instance."""
    row = row_of(Event(instance, **options))
    return row[0], json.loads(row[1]), row[2]


def test_type_key_and_payload_come_from_the_class() -> None:
    payload: Any = {"id": 1, "total": "12.50", "lines": [{"sku": "a", "number": 1}], "counts": {}}
    order = OrderCreated.model_validate({"id": 1, "total": "12.50", "lines": [{"sku": "a"}]})
    assert sent(order) == ("order.created", payload, "1")
    assert sent(order, key="other")[2] == "other"
    assert sent(OrderPaid(2, 1.5))[2] == "order-2"
    assert sent(OrderPacked(UID, 3)) == ("order/packed~{x}%", {"id": str(UID), "weight": 3, "next": None}, None)
    assert sent(OrderNamed(order_name="x"))[1] == {"orderName": "x"}


def test_elements_of_a_batch_may_be_instances() -> None:
    assert [row[0] for row in rows_of([OrderPaid(1, 1.0), Event(OrderPaid(2, 1.0), key="k"), Event("a", 1)])] == [
        "order.paid",
        "order.paid",
        "a",
    ]


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: row_of(Event(Undeclared(1))),
        "type is a Undeclared, which is not declared: decorate the class with @event",
    ),
    (lambda: row_of(Event(OrderReopened(id=1, total=Decimal(1)))), "has no @event of its own"),
    (lambda: row_of(Event(cast(Any, OrderPaid))), "not the class OrderPaid"),
    (lambda: row_of(Event(OrderPaid(1, 1.0), {})), "payload is given twice: the OrderPaid is the payload"),
    (lambda: row_of(Event(OrderPaid(1, 1.0), dumps=json.dumps)), "dumps must be left out"),
    (lambda: row_of(Event("order.paid")), "payload is missing: pass it after the type"),
    (lambda: row_of(Event(OrderPaid(1, SECRET))), r"OrderPaid has str at \$.amount"),  # pyright: ignore[reportArgumentType]
    (lambda: row_of(Event(OrderPacked(UID, SECRET))), r"OrderPacked has str at \$.weight"),  # pyright: ignore[reportArgumentType]
    (lambda: row_of(Event(OrderCreated.model_construct(id=1, total=SECRET))), r"OrderCreated has str at \$.total"),
    (lambda: row_of(Event(OrderPaid(1, float("nan")))), r"not JSON compliant at \$.amount"),
    (lambda: row_of(Event("a", {"orders": [{"total": Decimal(1)}]})), r"type Decimal .* at \$.orders\[0\].total"),
    (lambda: row_of(Event("a", {f"{SECRET}@b": Decimal(1)})), r"type Decimal .* at \$.\*"),
    (lambda: rows_of([Event("a", 1), Event(Undeclared(1))]), "event 1: type is a Undeclared"),
    (lambda: row_of(Event(cast(Any, Event("a", 1)))), "type is an Event: pass a list of them to emit_many"),
    (lambda: row_of(Event(OrderCreated.model_construct())), "key cannot be taken from the OrderCreated"),
    (lambda: rows_of([Event("a", 1), Event("b")]), "event 1: payload is missing"),
    (lambda: event("order created"), "' ' at character 6"),
    (lambda: event("outbox.dead"), "is reserved"),
    (lambda: event(""), "has 0 characters"),
    (lambda: event(OrderPaid), "type must be a str"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("act", "said"), BAD, ids=[said for _, said in BAD])
def test_faults_are_named(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidEvent, match=said) as caught:
        act()
    assert SECRET not in str(caught.value)


class Color(Enum):
    """A type that is a definition in the schema."""

    RED = "red"


@event("optional", key="id")
@dataclass
class Optional:
    """A class with fields that may be None, and fields that may not."""

    id: int
    color: Color = Color.RED
    either: int | str = 1
    note: str | None = None
    other: Any = None
    paint: Color | None = None
    next: Optional | None = None


def test_what_cannot_be_declared_is_refused() -> None:
    with pytest.raises(TypeError, match="int is no dataclass, pydantic model or msgspec Struct"):
        event("a")(int)
    with pytest.raises(ValueError, match="Undeclared has no attribute 'number'"):
        event("a", key="number")(Undeclared)


def test_an_instance_is_shown_without_its_payload() -> None:
    assert SECRET not in repr(Event(OrderNamed(order_name=SECRET), key="k"))


# -- documents --------------------------------------------------------------------------------------------------------


def test_the_schema_takes_what_is_emitted() -> None:
    found = document(MODULE)
    Draft202012Validator.check_schema(found)
    validator = PayloadValidator(found)
    linked = OrderPacked(UID, 1, OrderPacked(UID, 2))
    for instance in (OrderCreated(id=1, total=Decimal(1)), OrderPaid(1, 1.0), linked, OrderNamed(order_name="x")):
        row = row_of(Event(instance))
        assert validator.difference(row[0], row[6], row[1]) is None


DIFFERENT: list[tuple[str, bytes, str]] = [
    ("order.created", b'{"id": "x", "total": "1"}', "$.id: expected integer, found string"),
    ("order.created", b'{"id": 1}', "$.total: expected string, found no value"),
    (
        "order.created",
        b'{"id": 1, "total": "1", "lines": [{"sku": 7}]}',
        "$.lines[0].sku: expected string, found integer",
    ),
    (
        "order.created",
        b'{"id": 1,"total": "1","counts":{"4929-1": "x"}}',
        "$.counts.*: expected integer, found string",
    ),
    (
        "order.named",
        b'{"orderName": "x", "b": 1}',
        "$: expected no fields but those of the schema, found other fields",
    ),
    ("order.paid", b'{"id": 1, "amount": 1, "at": "now"}', '$.at: expected format "date-time", found string'),
    ("order/packed~{x}%", b'{"id": "x", "weight": 1}', '$.id: expected format "uuid", found string'),
    ("order.created", b"{", "$: expected JSON, found bytes that are not JSON"),
    ("order.created", b'{"id": NaN, "total": "1"}', "$: expected JSON, found bytes that are not JSON"),
]


@pytest.mark.parametrize(("kind", "payload", "said"), DIFFERENT, ids=[said for _, _, said in DIFFERENT])
def test_a_difference_names_place_and_types_alone(kind: str, payload: bytes, said: str) -> None:
    assert str(PayloadValidator(document(MODULE)).difference(kind, "application/json", payload)) == said


@pytest.mark.parametrize("topic", [None, "shop.{type}"])
def test_the_asyncapi_document_is_valid(topic: str | None) -> None:
    found = json.loads(json.dumps(asyncapi(load(MODULE), "Events", "1", topic)))
    validator: Any = Draft7Validator(json.loads(ASYNCAPI.read_text(encoding="utf-8")))
    assert [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(found)] == []
    [keyed] = [each for each in found["components"]["messages"].values() if each["name"] == "order.created"]
    assert keyed["bindings"]["kafka"]["key"] == {"type": "string"}
    [tuples] = [each for each in found["components"]["messages"].values() if each["name"] == "order.paid"]
    assert [each["type"] for each in tuples["payload"]["properties"]["parts"]["items"]] == ["integer", "string"]
    addresses = {each["address"] for each in found["channels"].values()}
    assert addresses == ({None} if topic is None else {f"shop.{each}" for each in load(MODULE)})


def test_references_of_the_documents_lead_to_definitions() -> None:
    for found in (document(MODULE), asyncapi(load(MODULE), "Events", "1", None)):
        for reference in _references(found):
            validator: Any = Draft202012Validator({**found, "$ref": reference})
            validator.is_valid(1)


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for each in cast("list[Any]", value) for found in _references(each)]
    if not isinstance(value, dict):
        return []
    members = cast("dict[str, Any]", value)
    own: list[str] = [members["$ref"]] if isinstance(members.get("$ref"), str) else []
    return own + [found for each in members.values() for found in _references(each)]


# -- releases ---------------------------------------------------------------------------------------------------------

EARLIER = """
from dataclasses import dataclass, field
from datetime import timedelta
from outbox_relay.catalogue import event

@event("order.created")
@dataclass
class OrderCreated:
    id: int
    total: int
    note: str = ""
    next: "OrderCreated | None" = None

@event("order.gone")
@dataclass
class OrderGone:
    id: int
"""
ADDITIVE = EARLIER.replace('    note: str = ""\n', "    extra: int = 1\n")
BREAKING: list[tuple[str, str, str]] = [
    ("total: int", "total: str", "breaking: order.created $.total: type changed from integer to string"),
    (
        "total: int",
        "total: int | None",
        "breaking: order.created $.total: type changed from integer to integer or null",
    ),
    ("    total: int\n", "", "breaking: order.created $.total: required field removed"),
    ("    total: int\n", "    total: int\n    more: int\n", "breaking: order.created $.more: new required field"),
    ('note: str = ""', "note: int = 1", "breaking: order.created $.note: type changed from string to integer"),
    ("    total: int\n", "    total: int = 1\n", "breaking: order.created $.total: field became optional"),
    ('"order.gone"', '"order.left"', "breaking: order.gone $: type removed"),
]


def compared(folder: Path, later: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Return exit code and lines of a check of a module against its earlier version."""
    monkeypatch.chdir(folder)
    for name, text in (("earlier_events", EARLIER), ("later_events", later)):
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        printed = inside("catalogue", "jsonschema", "earlier_events")
        (folder / "released.json").write_text(printed.out)
        ended = inside("catalogue", "check", "later_events", "--against", "released.json")
    finally:
        sys.path.remove(str(folder))
    assert (printed.code, ended.err) == (0, "")
    return ended.code, ended.out.splitlines()


@pytest.mark.parametrize(("before", "after", "said"), BREAKING, ids=[said for *_, said in BREAKING])
def test_a_breaking_change_is_named(
    before: str, after: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = compared(tmp_path, EARLIER.replace(before, after), monkeypatch)
    assert (code, said in lines) == (1, True), lines


def test_an_additive_change_is_named_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = compared(tmp_path, ADDITIVE, monkeypatch)
    assert code == 0
    assert lines == [
        "additive: order.created $.extra: new optional field",
        "additive: order.created $.note: optional field removed",
    ]


# -- the command's mistakes -------------------------------------------------------------------------------------------


def test_mistakes_of_the_module_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    twice = EARLIER.replace('"order.gone"', '"order.created"')
    broken = f"raise RuntimeError({SECRET!r})"
    for name, text, said in (
        ("events_none", "x = 1", "module events_none has no class with @event"),
        ("events_twice", twice, "type order.created is declared twice"),
        ("events_broken", broken, "module events_broken could not be imported: RuntimeError ("),
        ("events_absent", None, "No module named 'events_absent'"),
    ):
        if text is not None:
            (tmp_path / f"{name}.py").write_text(text)
        ended = inside("catalogue", "jsonschema", name)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
        assert SECRET not in ended.err
