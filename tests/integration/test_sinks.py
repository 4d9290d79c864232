"""Sinks that are removed: what the schema does, and how relays that run and start obey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, ids
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.roles import denied, new_role
from tests.support.sink_actions import audited, call, register, remove
from tests.support.wait import until


def ask(database: Database, *arguments: str | Path) -> Ended:
    """Run a command on `database` by --dsn alone."""
    return inside(*arguments, "--dsn", database.dsn)


# -- remove ---------------------------------------------------------------------------------------------------------


@pytest.mark.fence("an old file brings a removed sink back")
def test_a_removed_sink_is_not_registered_again_until_its_name_is_forgotten(database: Database) -> None:
    first = register(database, "s")
    emit(database, ["a"])
    assert remove(database, "s")["removed"]
    assert register(database, "s") == 0
    assert query(database, "select 1 from outbox.sink union all select 1 from outbox.progress") == []
    assert remove(database, "s", forget=True) | {"audit": 0} == {
        "removed": False, "forgotten": True, "deliveries": 0, "audit": 0,
    }  # fmt: skip
    assert register(database, "s") > first
    assert audited(database) == [
        ("sinks remove", "s", {"forget": False}, 0, "tester"),
        ("sinks forget", "s", {"forget": True}, 0, "tester"),
    ]


def test_many_rows_are_deleted_in_steps_of_which_the_audit_has_one_row(database: Database) -> None:
    with ledger(database) as books:
        books.register(("s", ["*"], "beginning"))
        books.own("s")
        books.park("s", *[books.row(event) for event in books.emit(*"abcde")])
    call(database, "insert into outbox.discarded (sink, id, uid, reason) values ('s', 1, gen_random_uuid(), 'x')")
    step = remove(database, "s", most=2)
    assert (step["removed"], step["deliveries"]) == (False, 2)
    assert query(database, "select paused, (select count(*) from outbox.delivery) from outbox.sink") == [(True, 3)]
    ended = ask(database, "sinks", "remove", "s", "--yes", "--json")
    assert (ended.code, ended.json) == (0, {"done": 3, "left": 0})
    assert query(database, "select 1 from outbox.discarded union all select 1 from outbox.delivery") == []
    again = ask(database, "sinks", "remove", "s")
    assert (again.code, again.out) == (0, "sink s is already removed\n")
    assert [row[3] for row in audited(database)] == [2, 3]


def test_removal_says_first_what_is_lost_and_asks(database: Database) -> None:
    register(database, "s")
    emit(database, ["a", "b"])
    ended = ask(database, "sinks", "remove", "s")
    assert (ended.code, ended.out) == (2, "")
    assert "Remove sink s, with 0 rows? 2 events will not be delivered." in ended.err
    assert "add --yes" in ended.err
    assert query(database, "select name from outbox.sink") == [("s",)]
    ended = ask(database, "sinks", "remove", "s", "--yes", "--forget")
    assert (ended.code, ended.out) == (0, "sink s is removed, with 0 rows\n")
    assert register(database, "s") > 0


def test_a_relay_with_a_removed_sink_serves_its_others_and_shows_the_fault(database: Database) -> None:
    gone, stays = MemorySink(), MemorySink()
    register(database, "s")
    remove(database, "s")
    with running(database.dsn, (spec("s"), gone), (spec("t"), stays)) as harness:
        delivered(stays, emit(database, ["a"]))
        _shows_fault(harness)
        assert register(database, "s") == 0
    assert ids(gone) == []


def _shows_fault(harness: RelayHarness) -> None:
    until(lambda: "--forget" in str(harness.loop("s").fault), seconds=10, what="the fault is shown")


# -- list, roles, service ------------------------------------------------------------------------------------------


def test_the_list_has_sinks_and_removed_ones(database: Database) -> None:
    assert ask(database, "sinks", "list").out.startswith("no sink is known yet")
    generation = register(database, "s", "a.*", "b")
    register(database, "t")
    remove(database, "t")
    found = ask(database, "sinks", "list", "--json").json
    [sink] = found["sinks"]
    assert (sink["name"], sink["generation"], sink["patterns"]) == ("s", generation, ["a.*", "b"])
    assert (sink["start"], sink["paused"], sink["relays"]) == ("beginning", False, [])
    [former] = found["former"]
    assert (former["name"], former["actor"]) == ("t", "tester")
    text = ask(database, "sinks", "list").out
    assert "a.* b" in text
    assert "REMOVED SINK" in text


@pytest.fixture
def operator(database: Database) -> Iterator[str]:
    """Yield an operator's role."""
    with new_role(database, "operator") as name:
        migrate(database.dsn, grants={"operate": [name]})
        yield name


@pytest.fixture
def relay(database: Database) -> Iterator[str]:
    """Yield a relay's role."""
    with new_role(database, "relay") as name:
        migrate(database.dsn, grant_relay=[name])
        yield name


def test_an_operator_acts_and_sees_no_payload(database: Database, operator: str) -> None:
    register(database, "s")
    emit(database, ["a"])
    dsn = database.dsn_as(operator)
    for command in (
        ("list",), ("seek", "s", "--to", "beginning", "--yes"), ("seek", "s", "--to", "now", "--yes"),
        ("remove", "s", "--yes"), ("remove", "s", "--forget"),
    ):  # fmt: skip
        ended = inside("sinks", *command, "--dsn", dsn)
        assert (ended.code, ended.err) == (0, ""), ended
    assert [row[0] for row in audited(database)] == [
        "sinks seek", "sinks seek", "sinks remove", "sinks forget",
    ]  # fmt: skip
    assert {row["role_name"] for row in call(database, "select role_name from outbox.audit")} == {operator}
    for column in ("payload", "headers"):
        denied(database, operator, f"select {column} from outbox.event")
        denied(database, operator, f"select {column} from outbox.delivery")
