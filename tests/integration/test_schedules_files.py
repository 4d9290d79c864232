"""Relays with different files: the definitions of those that stay win, whatever a leaving one has registered."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from outbox_relay.postgres.store import Store
from outbox_relay.relay import schedules
from tests.support.database import Database, query
from tests.support.schedules import Part, part, register, row, schedule

OLD, NEW = schedule(payload={"by": "old"}), schedule(payload={"by": "new"})


@pytest.fixture
def store(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(schedules, "HOLD_SECONDS", 0.0)
    opened = Store(lambda: database.dsn, pooler=False, connections=8)
    opened.open()
    yield opened
    opened.close()


def lives(database: Database, relay: UUID, name: str = "web-1") -> None:
    """Make the row of a live relay."""
    text = "insert into outbox.relay (id, name, version, sinks) values (%s, %s, '1', '{}') returning 1"
    assert query(database, text, relay, name)


def ends(database: Database, relay: UUID) -> None:
    """Remove the row of a relay, as its end does."""
    assert query(database, "delete from outbox.relay where id = %s returning 1", relay)


def keep(*parts: Part, times: int = schedules.UNHELD_LOOKS + 1) -> None:
    """Let each relay look at the definitions as often as it takes to take them back."""
    for _ in range(times):
        for each in parts:
            each.definitions.keep()


def payload(database: Database) -> object:
    """Return the payload of the schedule in force."""
    return row(database)["payload"]


def pair(database: Database, store: Store) -> tuple[Part, Part]:
    """Return a relay that stays and one that was restarted with an old file after it, and is in force."""
    staying, leaving = part(store, NEW), part(store, OLD)
    for each in (staying, leaving):
        lives(database, each.relay)
        each.definitions.keep()
    assert payload(database) == {"by": "old"}
    return staying, leaving


@pytest.mark.fence("a relay that restarts with an old file leaves its schedules in force after its end")
def test_the_definition_of_a_relay_that_stays_is_taken_back_when_the_other_one_has_ended(
    database: Database, store: Store
) -> None:
    staying, leaving = pair(database, store)
    ends(database, leaving.relay)
    before = row(database)["generation"]
    keep(staying)
    assert payload(database) == {"by": "new"}
    assert row(database)["generation"] > before
    keep(staying)
    assert row(database)["generation"] == before + 1, "once"


@pytest.mark.fence("a relay that restarts with an old file leaves its schedules in force after its end")
def test_while_a_relay_that_has_it_lives_the_newest_definition_stays(database: Database, store: Store) -> None:
    staying, leaving = pair(database, store)
    before = row(database)
    keep(staying, leaving, times=10)
    assert row(database) == before


def test_a_restored_database_gets_the_definitions_of_its_relays(database: Database, store: Store) -> None:
    register(database, OLD)
    relay = part(store, NEW)
    lives(database, relay.relay)
    relay.definitions.keep()
    query(database, 'update outbox.schedule set payload = \'{"by": "restored"}\' returning 1')
    query(database, "update outbox.schedule set generation = 1 returning 1")
    keep(relay)
    assert payload(database) == {"by": "new"}
