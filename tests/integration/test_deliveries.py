"""Deliveries that a filter selects: list, number and summary, and filters that are refused."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox_relay import admin
from outbox_relay.domain.errors import ConfigurationError
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with the sinks `crm` and `events` for every type, owned by one relay."""
    with ledger(database) as found:
        found.register(("crm", ["*"], "beginning"), ("events", ["*"], "beginning"))
        for sink in ("crm", "events"):
            found.own(sink)
        yield found


def listed(books: Ledger, **wanted: Any) -> list[str]:
    """Return the uids of the deliveries that a filter selects, in the order of the list."""
    return [found["uid"] for found in admin.list_deliveries(books.store, wanted, 50)]


def dead(books: Ledger, *keys: str | None, sink: str = "crm", kind: str = "t", **values: Any) -> list[str]:
    """Emit an event per key, which is dead for the sink; their uids."""
    ids = books.emit(*keys, type=kind)
    books.park(sink, *(books.row(i, "dead", **values) for i in ids))
    return [books.uid(i) for i in ids]


# -- list ---------------------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_newest_first_with_all_that_is_shown(books: Ledger) -> None:
    [first] = dead(books, "k1", kind="order.created", attempts=3, error="no such field", status=422)
    [second] = dead(books, None, sink="events")
    [newer, older] = admin.list_deliveries(books.store, {}, 50)
    assert [newer["uid"], newer["sink"], newer["key"]] == [second, "events", None]
    assert older.pop("since").endswith("+00:00")
    assert older.pop("last_attempt_at").endswith("+00:00")
    assert older == {
        "uid": first,
        "sink": "crm",
        "type": "order.created",
        "key": "k1",
        "state": "dead",
        "attempts": 3,
        "error": "no such field",
        "status": 422,
        "due_at": None,
    }
    assert [found["uid"] for found in admin.list_deliveries(books.store, {}, 1)] == [second]


def test_every_part_of_a_filter_must_hold(books: Ledger) -> None:
    [a] = dead(books, "k1", kind="order.created", error="No such field", status=422)
    [b] = dead(books, "k2", kind="order.paid", error="timeout", status=None)
    [c] = dead(books, "k1", kind="user.created", sink="events", error="field", status=500)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"sink": "crm"}, [b, a]),
        ({"type": "order.*"}, [b, a]),
        ({"type": "*.created"}, [c, a]),
        ({"type": "order.paid"}, [b]),
        ({"key": "k1"}, [c, a]),
        ({"error": "FIELD"}, [c, a]),
        ({"status": 422}, [a]),
        ({"kind": "timeout"}, [b]),
        ({"kind": "No such field"}, []),
        ({"uids": [a.upper(), b, str(uuid4())]}, [b, a]),
        ({"key": "k1", "sink": "events"}, [c]),
        ({"key": "k1", "status": 404}, []),
        ({"since": "PT3600S", "until": "PT0S"}, [c, b, a]),
        ({"until": "PT3600S"}, []),
        ({"since": "2026-01-01T00:00:00Z", "until": "PT0.000001S"}, [c, b, a]),
    ]
    for wanted, found in cases:
        assert listed(books, **wanted) == found, wanted
        assert admin.count_deliveries(books.store, wanted) == admin.Matched(len(found), True)


# -- number -------------------------------------------------------------------------------------------------------


# -- summary ------------------------------------------------------------------------------------------------------


def test_a_summary_groups_by_sink_type_and_kind_of_error(books: Ledger) -> None:
    for number in range(3):
        dead(books, "k", kind="order.created", error=f"row {number} of {uuid4()} is locked")
    dead(books, "k", "k", kind="order.created", error="answered 422: x", status=422)
    dead(books, "k", kind="order.created", error="answered 422: y", status=422)
    dead(books, "k", sink="events")
    found = admin.summarize(books.store, {})
    groups = [(g["sink"], g["type"], g["error"], g["status"], g["count"]) for g in found["groups"]]
    assert groups == [
        ("crm", "order.created", "row N of … is locked", None, 3),
        ("crm", "order.created", None, 422, 3),
        ("events", "t", None, None, 1),
    ]
    assert found["exact"]
    assert found["groups"][0]["first"] <= found["groups"][0]["last"]
    for sink, type_, error, status, count in groups:
        given = {"kind": error or ""} if status is None else {"status": status}
        assert len(listed(books, sink=sink, type=type_, **given)) == count
    text = admin.summary_text(found)
    assert "status 422: answered 422: x" in text
    assert admin.summarize(books.store, {"sink": "events", "type": "x"}) == {"groups": [], "exact": True}


# -- filters that are refused -------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str]] = [
    ("null", "must be a JSON object, not null"),
    ("[]", "must be a JSON object, not array"),
    ('"sink"', "must be a JSON object, not string"),
    ('{"sinks": "crm"}', 'no field "sinks"; it has: sink, type'),
    ('{"sink": null}', "sink of a filter must be a string, not null"),
    ('{"key": 7}', "key of a filter must be a string, not number"),
    ('{"status": "422"}', "status of a filter must be a number, not string"),
    ('{"status": 4.5}', "status of a filter must be an integer"),
    ('{"status": 99999999999}', "status of a filter must be an integer"),
    ('{"type": ""}', "type of a filter must be a pattern"),
    ('{"type": "a b"}', "type of a filter must be a pattern"),
    ('{"error": ""}', "error of a filter must have 1 to 500 characters"),
    ('{"kind": 7}', "kind of a filter must be a string, not number"),
    (json.dumps({"kind": "x" * 201}), "kind of a filter must have at most 200 characters"),
    ('{"as_of": 7}', "as_of of a filter must be a string, not number"),
    ('{"as_of": "yesterday"}', "as_of must be a time with its zone"),
    ('{"as_of": "9000-01-01T00:00:00Z"}', "as_of lies in the future: it is 9000-01-01"),
    (json.dumps({"key": "é" * 513}), "key of a filter must have at most 1024 bytes"),
    ('{"uids": []}', "uids of a filter must be 1 to 1000 uids, not 0"),
    ('{"uids": [null]}', "uids of a filter must be UUIDs"),
    ('{"uids": ["x"]}', "uids of a filter must be UUIDs"),
    ('{"uids": "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b"}', "uids of a filter must be an array, not string"),
    (json.dumps({"uids": [str(UUID(int=n)) for n in range(1001)]}), "1 to 1000 uids, not 1001"),
    ('{"states": []}', "states of a filter must be some of dead, waiting, held, scheduled"),
    ('{"states": ["dead", null]}', "states of a filter must be some of"),
    ('{"states": ["under-way"]}', "states of a filter must be some of"),
    ('{"since": "yesterday"}', "since must be a time with its zone"),
    ('{"since": "infinity"}', "since must be a time with its zone"),
    ('{"since": "2026-11-23T08:00:00"}', "since must be a time with its zone"),
    ('{"since": "2026-13-45T08:00:00Z"}', "since must be a time with its zone"),
    ('{"until": "9999-01-01T00:00:00Z"}', "until must be a time with its zone in the years 1 to 9998"),
    ('{"until": "0001-01-01T00:00:00+01"}', "until must be a time with its zone in the years 1 to 9998"),
    ('{"until": "PT"}', "until must be a time with its zone"),
    ('{"since": "9000-01-01T00:00:00Z"}', "since lies in the future: it is 9000-01-01"),
    ('{"until": "9000-01-01T00:00:00+14:00"}', "until lies in the future: it is 8999-12-31"),
    ('{"since": "PT1S", "until": "PT2S"}', r"since .* is after until"),
]


def test_a_filter_is_refused_with_its_fault(books: Ledger) -> None:
    for wanted, message in REFUSED:
        if wanted.startswith("{"):
            with pytest.raises(ConfigurationError, match=message):
                admin.count_deliveries(books.store, json.loads(wanted))
        for call in ("deliveries(%s)", "delivery_summary(%s)", "retry_deliveries(%s)"):
            with pytest.raises(psycopg.errors.InvalidParameterValue, match=message):
                books.query(f"select * from outbox.{call}".replace("%s", "%s::jsonb"), wanted)
    assert books.query("select count(*) from outbox.audit") == [(0,)]
