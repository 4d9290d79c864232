"""The fences of replays: settlements, counts, dead letters, removals, days."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import DatabaseUnusable
from tests.support import days
from tests.support.database import Database, query
from tests.support.days import date_ago, emit_ago, fill_days, keep, retention
from tests.support.ledger import ledger
from tests.support.replay_ledger import ReplayLedger
from tests.support.replays import act, counts, show, start, tend
from tests.support.sink_actions import call, register, remove

KEYS = [f"k{n % 7}" for n in range(40)]
ROWS = "select sink, state, replay, ordered from outbox.delivery order by id, sink"


@pytest.fixture
def books(database: Database) -> Iterator[ReplayLedger]:
    """Yield a database with one sink `s` for every type that has passed 40 events, and a replay of all of them."""
    with ledger(database) as found:
        mine = ReplayLedger(database, found.store)
        mine.register(("s", ["*"], "beginning"))
        mine.own("s")
        mine.emit(*KEYS)
        mine.catch_up("s")
        start(database, since="PT1H")
        yield mine


@pytest.mark.fence("a relay that lost a shard of a replay settles, or counts what it delivered")
def test_a_settlement_of_a_replay_at_an_old_epoch_writes_and_counts_nothing(books: ReplayLedger) -> None:
    """Goes red when outbox_internal.settle_replayed does not compare epochs and owners."""
    old = books.claim()
    assert books.settle(old, 10, 10)
    new = {c.shard: c.epoch for c in books.store.reclaim_shards("~1", books.relay)}
    assert not books.settle(old, 20, 10)
    assert not books.settle(old, 20, 10, books.row(15))
    assert not books.settle(new, 20, 10, owner=uuid4())
    assert books.settle(new, 20, 10)
    assert counts(books.database, 1)[1] == 20
    assert books.query("select from outbox.delivery") == []


def test_a_claim_passes_by_the_shards_of_a_settlement_of_a_replay(books: ReplayLedger) -> None:
    epochs = books.claim()
    books.lapse()
    with books.database.connect() as other:
        other.execute("select from outbox.shard where sink = '~1' for share")
        assert books.claim() == {}
    books.lapse()
    assert set(books.claim()) == set(epochs)


@pytest.mark.fence("a dead letter of a replay is read again, or taken for one of the sink's first deliveries")
def test_a_row_that_the_position_has_not_passed_is_neither_moved_nor_counted(books: ReplayLedger) -> None:
    """Goes red when dead rows are moved at once: after a crash their event is read again, and left out or doubled."""
    epochs = books.claim()
    books.store.settle_replay(1, books.relay, {}, 0, [books.row(5, "dead")], epochs)
    tend(books.database)
    assert counts(books.database, 1)[1:3] == (0, 0)
    assert books.query(ROWS) == [("~1", "dead", None, True)]
    books.settle(epochs, 10, 10)
    assert counts(books.database, 1)[1:3] == (9, 1)
    tend(books.database)
    assert counts(books.database, 1)[1:3] == (9, 1)
    assert books.query(ROWS) == [("s", "dead", 1, False)]
    act(books.database, "cancel", 1)
    books.query("update outbox.shard set owner = null where sink = '~1' returning 1")
    tend(books.database)
    assert counts(books.database, 1)[1:3] == (9, 1)


@pytest.mark.fence("a dead letter of a replay is read again, or taken for one of the sink's first deliveries")
def test_a_dead_letter_waits_until_the_target_has_passed_its_event(books: ReplayLedger) -> None:
    """Goes red when it is moved at once: the target would take the row for one of its own first delivery."""
    register(books.database, "t")
    number = start(books.database, to="t", since="PT1H")
    epochs = books.claim(number, "t")
    assert books.settle(epochs, 40, 40, books.row(5, "dead"), replay=number)
    tend(books.database)
    tend(books.database)
    assert books.query(ROWS) == [(f"~{number}", "dead", None, True)]
    assert show(books.database, number)["state"] == "running"
    books.know_epochs("t")
    books.catch_up("t")
    tend(books.database)
    assert books.query(ROWS) == [("t", "dead", number, False)]
    assert show(books.database, number)["state"] == "done"
    assert counts(books.database, number) == (40, 39, 1, 0)


def test_an_event_that_is_erased_between_read_and_settlement_becomes_no_row(books: ReplayLedger) -> None:
    """Goes red when rows are made of the remains of an erasure: a husk would be delivered."""
    epochs = books.claim()
    books.query("update outbox.event set content_type = 'application/x-erased', payload = '' where id = 5 returning 1")
    with pytest.raises(DatabaseUnusable, match="no longer in the log"):
        books.settle(epochs, 40, 40, books.row(5), books.row(6))
    assert books.query("select id from outbox.delivery") == []
    assert counts(books.database, 1)[1] == 0


@pytest.mark.fence("a sink is renamed or removed while it gets dead letters of a replay")
def test_the_replay_of_a_removed_sink_leaves_nothing_to_a_new_one_of_its_name(database: Database) -> None:
    """Goes red when dead letters are moved by the name of the target."""
    register(database, "s")
    register(database, "t")
    call(database, "select outbox.emit('t', '1')")
    start(database, to="s", since="PT1H")
    call(
        database,
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at) "
        "select '~1', id, shard, 'dead', true, now(), uid, type, coalesce(content_type, 'application/json'), "
        "created_at from outbox.event",
    )
    call(database, "update outbox.replay_progress set last_ids = array_fill(100::bigint, array[64])")
    remove(database, "s", forget=True)
    register(database, "s")
    call(database, "update outbox.progress set a_seq = 100, a_snapshot = pg_current_snapshot(), a_next = 100")
    for _ in range(3):
        tend(database)
    assert query(database, "select from outbox.delivery") == []
    assert show(database, 1)["state"] == "cancelled"
    assert query(database, "select from outbox.shard where sink = '~1'") == []


# -- days --------------------------------------------------------------------------------------------------------


@pytest.mark.fence("a day is emptied that a replay may read")
def test_a_replay_keeps_the_days_that_it_may_still_read(database: Database) -> None:
    """Goes red when outbox_internal.retention_blockers leaves replays out."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 10)
        keep(connection, 5)
        days.register(connection, "s", "now")
        emit_ago(connection, 0)
    start(database, to="s", since=f"{date_ago(11)}T00:00:00Z", until=f"{date_ago(10)}T00:00:00Z")
    ended = retention(database, "run", "--json")
    assert ended.json["emptied"] == [date_ago(12), date_ago(10)]
    assert list(ended.json["kept"]) == [date_ago(11)]
    assert "replay 1" in str(retention(database, "status").out)
    act(database, "cancel", 1)
    assert retention(database, "run", "--json").json["emptied"] == [date_ago(11)]


def test_a_replay_keeps_a_day_since_its_start_whether_or_not_a_pass_has_seen_it(database: Database) -> None:
    """Goes red when the time of the question is shown until a pass has looked at the day."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 11)
        keep(connection, 5)
        days.register(connection, "s", "now")
    start(database, to="s", since=f"{date_ago(12)}T00:00:00Z")
    query(database, "update outbox.replay set created_at = '2026-03-01 12:30:15.5+01' returning 1")

    def since() -> list[Any]:
        found = retention(database, "status", "--json").json["days"]
        return [keeper["since"] for day in found for keeper in day["kept_by"]]

    assert since() == ["2026-03-01T11:30:15+00:00"] * 2
    assert retention(database, "run").code == 0
    assert since() == ["2026-03-01T11:30:15+00:00"] * 2
