"""Types of notices: no function that matches types gives them to another sink than their receiver."""

from __future__ import annotations

from collections.abc import Generator
from uuid import UUID

import pytest

from outbox_relay import admin
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.notices import notice_types
from tests.support.sink_actions import call, register

EVERYTHING = "9223372036854775807:9223372036854775807:"
OF_RECEIVERS = {"ops": 2, "ops_and_all": 5}
"""Sinks that receive notices, and how many of the two notices and three other events they get."""
OF_OTHERS = {"all": 3, "suffix": 1, "prefix": 0}
PATTERNS = {
    "all": ["*"],
    "suffix": ["*.dead", "*paused*"],
    "prefix": ["o*tbox*", "outb*.dead"],
    "ops": ["outbox.*"],
    "ops_and_all": ["*", "outbox.*"],
}
V10_TYPES = {"all": None, "suffix": ["%.dead", "%paused%"], "prefix": ["o%tbox%", "outb%.dead"]}
"""As a relay of an earlier version passes them."""


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a log with two notices and three events of an application, one of them of a similar type, and all sinks."""
    with ledger(database) as found:
        found.register(*((name, patterns, "beginning") for name, patterns in PATTERNS.items()))
        register(database, "crm", "order.*")
        found.emit("a", type="order.made")
        call(database, "select outbox.set_paused('crm', true, null, null)")
        found.emit("b", "c", type="order.dead")
        call(database, "select outbox.set_paused('crm', false, null, null)")
        call(database, "delete from outbox.event where type = 'order.dead' and key = 'c'")
        found.emit("d", type="my.outbox")
        assert notice_types(database) == ["outbox.sink.paused", "outbox.sink.recovered"]
        yield found


def expected() -> dict[str, int]:
    """Return the number of events of each sink."""
    return {**OF_OTHERS, **OF_RECEIVERS}


def types_of(books: Ledger, sink: str) -> list[str] | None:
    """Return the types of a sink as functions take them."""
    [(types,)] = books.query("select outbox_internal.types_of(%s)", sink)
    return types


@pytest.mark.fence("an application passes for the relay, or a sink for every type gets notices")
@pytest.mark.parametrize("sink", PATTERNS)
def test_only_receivers_read_notices(books: Ledger, sink: str) -> None:
    every = list(range(64))
    for types in (types_of(books, sink), V10_TYPES.get(sink, types_of(books, sink))):
        found = books.query(
            "select type from outbox_internal.read_rest(%s::smallint[], %s::text[], '3:3:', %s::pg_snapshot, 0,"
            " 1000000, 100, 1000000)",
            every, types, EVERYTHING,
        )  # fmt: skip
        assert len(found) == expected()[sink]
        assert any(kind.startswith("outbox.") for (kind,) in found) == (sink in OF_RECEIVERS)


def test_why_tells_who_gets_a_notice(books: Ledger) -> None:
    [(uid,)] = books.query("select uid::text from outbox.event where type ^@ 'outbox.' order by id limit 1")
    states = {name: said["state"] for name, said in admin.why(books.store, UUID(uid))["sinks"].items()}
    assert {name for name, state in states.items() if state == "pending"} == set(OF_RECEIVERS)
    for sink in PATTERNS:
        books.own(sink)
        books.catch_up(sink)
    states = {name: said["state"] for name, said in admin.why(books.store, UUID(uid))["sinks"].items()}
    assert states.pop("crm") == "not routed"
    assert states == {**dict.fromkeys(OF_OTHERS, "not routed"), **dict.fromkeys(OF_RECEIVERS, "settled")}


def test_a_notice_is_erased_only_once_its_receivers_have_it(books: Ledger) -> None:
    [(ids,)] = books.query("select array_agg(id) from outbox.event where type ^@ 'outbox.'")
    asked = "select outbox_internal.undelivered(null, null, %s, 0, 0)"
    [(undelivered,)] = books.query(asked, ids)
    assert {each["sink"] for each in undelivered} == set(OF_RECEIVERS)
