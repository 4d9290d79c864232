"""Relays with different files: the definitions of those that stay win, whatever a leaving one has registered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest
import pytest_asyncio

from outbox_relay.postgres.store import Store
from outbox_relay.relay import schedule_definitions
from tests.support.database import Database, query
from tests.support.schedules import Part, part, register, row, schedule

OLD, NEW = schedule(payload={"by": "old"}), schedule(payload={"by": "new"})


@pytest_asyncio.fixture
async def store(database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(schedule_definitions, "HOLD_SECONDS", 0.0)
    opened = Store(lambda: database.dsn, pooler=False, connections=8)
    await opened.open()
    yield opened
    await opened.close()


def lives(database: Database, relay: UUID, name: str = "web-1") -> None:
    """Make the row of a live relay."""
    text = "insert into outbox.relay (id, name, version, sinks) values (%s, %s, '1', '{}') returning 1"
    assert query(database, text, relay, name)


def ends(database: Database, relay: UUID) -> None:
    """Remove the row of a relay, as its end does."""
    assert query(database, "delete from outbox.relay where id = %s returning 1", relay)


async def keep(*parts: Part, times: int = schedule_definitions.UNHELD_LOOKS + 1) -> None:
    """Let each relay look at the definitions as often as it takes to take them back."""
    for _ in range(times):
        for each in parts:
            await each.definitions.keep()


def payload(database: Database) -> object:
    """Return the payload of the schedule in force."""
    return row(database)["payload"]


async def pair(database: Database, store: Store) -> tuple[Part, Part]:
    """Return a relay that stays and one that was restarted with an old file after it, and is in force."""
    staying, leaving = part(store, NEW), part(store, OLD)
    for each in (staying, leaving):
        lives(database, each.relay)
        await each.definitions.keep()
    assert payload(database) == {"by": "old"}
    return staying, leaving


async def test_the_definition_of_a_relay_that_stays_is_taken_back_when_the_other_one_has_ended(
    database: Database, store: Store
) -> None:
    staying, leaving = await pair(database, store)
    ends(database, leaving.relay)
    before = row(database)["generation"]
    await keep(staying)
    assert payload(database) == {"by": "new"}
    assert row(database)["generation"] > before
    await keep(staying)
    assert row(database)["generation"] == before + 1, "once"


async def test_while_a_relay_that_has_it_lives_the_newest_definition_stays(database: Database, store: Store) -> None:
    staying, leaving = await pair(database, store)
    before = row(database)
    await keep(staying, leaving, times=10)
    assert row(database) == before


async def test_a_relay_that_crashed_counts_as_gone_after_a_while(database: Database, store: Store) -> None:
    staying, leaving = await pair(database, store)
    query(
        database, "update outbox.relay set seen_at = now() - interval '20 s' where id = %s returning 1", leaving.relay
    )
    await keep(staying)
    assert payload(database) == {"by": "old"}
    query(
        database, "update outbox.relay set seen_at = now() - interval '31 s' where id = %s returning 1", leaving.relay
    )
    await keep(staying)
    assert payload(database) == {"by": "new"}


async def test_one_look_is_not_enough(database: Database, store: Store) -> None:
    """A relay with the same file may be about to say that it has it."""
    staying, leaving = await pair(database, store)
    ends(database, leaving.relay)
    await keep(staying, times=2)
    assert payload(database) == {"by": "old"}


async def test_a_relay_with_the_same_definition_keeps_it_in_force(database: Database, store: Store) -> None:
    """Although its own registration was replaced in between: it finds that the definition is its own."""
    same, other, last = part(store, OLD), part(store, NEW), part(store, OLD)
    for each in (same, other, last):
        lives(database, each.relay)
        await each.definitions.keep()
    generation = row(database)["generation"]
    await same.definitions.keep()
    ends(database, last.relay)
    await keep(other, same, times=10)
    assert payload(database) == {"by": "old"}
    assert row(database)["generation"] == generation


async def test_a_definition_that_was_changed_meanwhile_is_not_replaced(database: Database, store: Store) -> None:
    register(database, OLD)
    seen = row(database)["generation"]
    register(database, schedule(payload={"by": "newest"}))
    taken = await store.take_schedules([{**NEW, "seen": seen, "over": True}])
    assert taken == {}
    assert payload(database) == {"by": "newest"}


async def test_what_is_only_compared_is_not_changed(database: Database, store: Store) -> None:
    register(database, OLD)
    seen = row(database)["generation"]
    assert await store.take_schedules([{**NEW, "seen": seen, "over": False}]) == {}
    assert await store.take_schedules([{**OLD, "seen": 0, "over": False}]) == {"nightly": seen}
    assert payload(database) == {"by": "old"}


async def test_a_schedule_that_was_removed_is_not_brought_back(database: Database, store: Store) -> None:
    relay = part(store, NEW)
    lives(database, relay.relay)
    await relay.definitions.keep()
    query(database, "select outbox.set_schedule('nightly', 'remove', 'me', null)")
    await keep(relay, times=10)
    assert query(database, "select from outbox.schedule") == []


async def test_a_restored_database_gets_the_definitions_of_its_relays(database: Database, store: Store) -> None:
    register(database, OLD)
    relay = part(store, NEW)
    lives(database, relay.relay)
    await relay.definitions.keep()
    query(database, 'update outbox.schedule set payload = \'{"by": "restored"}\' returning 1')
    query(database, "update outbox.schedule set generation = 1 returning 1")
    await keep(relay)
    assert payload(database) == {"by": "new"}


async def relays_with(store: Store, name: str) -> list[str]:
    """Return the relays that have a schedule in their files."""
    [row] = await store.call("relays_with_schedule", {"name": name}, "operate")
    return row.relays


async def test_a_relay_says_which_schedules_it_has(database: Database, store: Store) -> None:
    relay = part(store, schedule("a"), schedule("b"))
    lives(database, relay.relay)
    await relay.definitions.keep()
    assert await relays_with(store, "b") == ["web-1"]
    relay.schedules.use([schedule("a")])
    await relay.definitions.keep()
    assert await relays_with(store, "b") == []
    relay.schedules.use([])
    await relay.definitions.keep()
    assert await relays_with(store, "a") == []


async def test_a_relay_whose_row_was_made_again_says_so_again(database: Database, store: Store) -> None:
    """Housekeeping removes the row of a relay that was suspended, and its next heartbeat makes another."""
    relay = part(store, NEW)
    await relay.definitions.keep()
    lives(database, relay.relay)
    await relay.definitions.keep()
    assert await relays_with(store, "nightly") == ["web-1"]


async def test_a_thousand_definitions_are_compared_with_those_of_many_relays(database: Database, store: Store) -> None:
    many = [schedule(f"s{n}") for n in range(1000)]
    relay = part(store, *many)
    await relay.definitions.keep()
    query(database, 'update outbox.schedule set payload = \'{"by": "other"}\' returning 1')
    [(known,)] = query(database, "select jsonb_object_agg(name, generation) from outbox.schedule")
    for n in range(20):
        lives(database, uuid4(), f"other-{n}")
    query(database, "update outbox.relay set schedules = %s returning 1", json.dumps(known))
    others = await store.hold_schedules(relay.relay, {each["name"]: 0 for each in many})
    assert len(others) == 1000
    assert all(each.held for each in others)
