"""Notices of sinks that lag: by their positions and by rows that wait, and at the cost of a few looks."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_relay.domain.window import Position
from tests.support.database import Database
from tests.support.ledger import ledger
from tests.support.notices import RECEIVER, notice_types, notices, register_receiver
from tests.support.sink_actions import call, register

PAUSED, RECOVERED, LAGGING = "outbox.sink.paused", "outbox.sink.recovered", "outbox.sink.lagging"


@pytest.fixture
def told(database: Database) -> Database:
    """Return a database with a sink `crm` for every type, and one that receives notices alone."""
    register(database, "crm")
    register_receiver(database)
    return database


def set_paused(database: Database, paused: bool) -> None:
    """Pause or resume the sink."""
    call(database, "select outbox.set_paused('crm', %s, null, null)", paused)


def test_a_sink_that_lags_is_told_and_so_is_its_recovery(told: Database) -> None:
    with ledger(told) as books:
        books.own("crm")
        books.emit("a", "b")
        assert lags(books) == {"crm": 0.0, RECEIVER: 0.0}
        books.do("update outbox.event set created_at = created_at - interval '400 seconds'")
        found = lags(books)
        assert found == {"crm": pytest.approx(400, abs=20), RECEIVER: pytest.approx(400, abs=20)}
        lags(books)
        [(kind, payload)] = notices(told)
        assert (kind, payload["sink"], payload["circuit"]) == (LAGGING, "crm", "closed")
        assert payload["lagging_seconds"] == 300
        assert payload["lag_seconds"] == pytest.approx(400, abs=20)
        books.do("update outbox.event set created_at = now() - interval '200 seconds' where not type ^@ 'outbox.'")
        lags(books)
        assert notice_types(told) == [LAGGING], "not recovered: it lags by more than half"
        books.catch_up("crm")
        assert (lags(books))["crm"] == 0
        assert notice_types(told) == [LAGGING, RECOVERED]
        assert notices(told)[1][1]["from"] == "lagging"


def test_one_shard_that_stands_still_is_a_lag_and_a_paused_sink_is_not_judged(told: Database) -> None:
    with ledger(told) as books:
        books.own("crm")
        behind = Position(books.tick())
        books.place("crm", behind)
        books.emit(*(f"k{n}" for n in range(20)))
        books.do("update outbox.event set created_at = created_at - interval '400 seconds'")
        books.place("crm", Position(books.tick()), range(1, 64))
        set_paused(told, True)
        lags(books)
        assert notice_types(told) == [PAUSED]
        set_paused(told, False)
        assert (lags(books))["crm"] > 300
        assert notice_types(told) == [PAUSED, RECOVERED, LAGGING]


def lags(books: Any) -> dict[str, float]:
    """Return the lag of each sink, 0 for one below a minute."""
    found = books.store.notify_sinks(300.0)
    return {sink: 0.0 if seconds < 60 else seconds for sink, seconds, _ in found}


def test_an_event_that_fails_again_and_again_is_a_lag_and_a_scheduled_one_is_not(told: Database) -> None:
    """A destination that is down for few events leaves the circuit closed, and positions move on."""
    with ledger(told) as books:
        books.own("crm")
        failed, later, dead = books.emit("a", "b", "c")
        books.do("update outbox.event set created_at = created_at - interval '400 seconds'")
        books.park("crm", books.row(later, ordered=False, due_in=9.0), books.row(dead, "dead"))
        books.do("update outbox.delivery set deliver_at = now() + interval '1 day' where state = 'waiting'")
        books.catch_up("crm")
        assert (lags(books))["crm"] == 0
        books.park("crm", books.row(failed, due_in=1800.0))
        assert (lags(books))["crm"] > 300
        books.do("update outbox.delivery set deliver_at = now() - interval '1 minute' where state = 'waiting'")
        assert (lags(books))["crm"] < 100
