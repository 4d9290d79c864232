"""Why of a key: its newest events in the log, if no uid is known."""

from __future__ import annotations

from collections.abc import Generator
from importlib import import_module
from uuid import UUID

import pytest

from outbox_relay import admin
from tests.support.database import Database, query
from tests.support.deliveries import emit
from tests.support.ledger import Ledger, ledger

MODULE = import_module("outbox_relay.admin.why")
KEYS = ["a", "b", "a", None, "a\x1b", "a", "b"]


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one sink `s` for every type and events of several keys."""
    with ledger(database) as found:
        found.register(("s", ["*"], "beginning"))
        emit(database, KEYS)
        yield found


def uids(books: Ledger, key: str) -> list[str]:
    """Return the uids of the events of a key, newest first."""
    asked = "select uid::text from outbox.event where key = %s order by id desc"
    return [uid for (uid,) in query(books.database, asked, key)]


@pytest.mark.parametrize("step", [1, 2, 100_000])
def test_the_newest_events_of_a_key_are_shown_as_each_alone(
    books: Ledger, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(MODULE, "STEP_IDS", step)
    wanted = uids(books, "a")
    found = admin.why_key(books.store, "a", 10)
    assert [event["uid"] for event in found["events"]] == wanted
    assert [event["sinks"]["s"]["state"] for event in found["events"]] == ["pending"] * 3
    assert (found["complete"], found["searched_since"]) == (True, None)
    assert admin.why_key_text(found).count("key a\n") == 3
    assert found["events"][0].keys() == (admin.why(books.store, UUID(wanted[0]))).keys()
    newest = admin.why_key(books.store, "a", 2)
    assert [event["uid"] for event in newest["events"]] == wanted[:2]
    assert newest["complete"]
