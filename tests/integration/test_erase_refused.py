"""Events that are not erased: a relay may still deliver them, or the server would refuse to change them."""

from __future__ import annotations

from uuid import uuid4

import pytest

from outbox_relay.domain.window import Position
from tests.support.database import Database
from tests.support.erasing import CONTENTS, Erasure, erase
from tests.support.ledger import Ledger, ledger
from tests.support.sink_actions import register


@pytest.mark.parametrize("state", ["dead", "waiting", "held"])
def test_an_event_with_a_row_is_refused_and_nothing_is_changed(books: Ledger, state: str) -> None:
    first, second = books.emit("k", "k", payload=b"kept")
    books.park("s", books.row(second, state))
    books.catch_up("s")
    ended = erase(books.database, "--key", "k")
    assert (ended.code, ended.out) == (1, "")
    assert f"event {books.uid(second)} is {state} in sink s\n" in ended.err
    assert "nothing was erased" in ended.err
    assert "outbox-relay dead discard" in ended.err
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2
    found = erase(books.database, "--uid", books.uid(second), "--json")
    assert (found.code, found.json["done"]) == (1, 0)
    assert found.json["undelivered"] == [{"uid": books.uid(second), "sink": "s", "state": state}]
    assert (erase(books.database, "--uid", books.uid(first))).code == 0
    assert books.query("select count(*) from outbox.erasure") == [(0,)]


def test_an_event_that_a_position_has_not_passed_is_refused(books: Ledger) -> None:
    books.catch_up("s")
    [event_id] = books.emit("k")
    assert Erasure(books.database, {"key": "k"}).run()["undelivered"] == [
        {"uid": books.uid(event_id), "sink": "s", "state": "pending"}
    ]
    books.catch_up("s")
    assert Erasure(books.database, {"key": "k"}).run()["done"] == 1


@pytest.mark.fence("an owner with earlier patterns or an earlier position still has an event")
def test_an_owner_of_earlier_patterns_may_still_deliver(database: Database) -> None:
    """Goes red when only the present patterns count."""
    with ledger(database) as books:
        books.register(("s", ["a.*"], "beginning"))
        books.own("s")
        [event_id] = books.emit("k", type="a.x")
        register(database, "s", "b.*")
        assert Erasure(database, {"key": "k"}).run()["phase"] == "refused"
        books.park("s", books.row(event_id))
        books.catch_up("s")
        assert Erasure(database, {"key": "k"}).run()["undelivered"][0]["state"] == "waiting"


@pytest.mark.fence("an owner with earlier patterns or an earlier position still has an event")
def test_positions_count_as_the_owner_of_a_shard_has_written_them(books: Ledger) -> None:
    """An owner begins behind a position, and what another one writes late is not where it is. Goes red without."""
    late = Ledger(books.database, books.store)
    late.epochs = {"s": dict(books.epochs["s"])}
    books.emit("k")
    books.do("update outbox.session set lease_until = clock_timestamp() - interval '1 second'")
    books.relay = uuid4()
    books.own("s")
    late.catch_up("s")
    assert Erasure(books.database, {"key": "k"}).run()["phase"] == "refused"
    books.do("update outbox.shard set owner = null")
    assert Erasure(books.database, {"key": "k"}).run()["done"] == 1


@pytest.mark.fence("the position of one shard counts for an event of another with the same uid")
def test_events_of_one_uid_in_two_shards_are_looked_at_in_both(books: Ledger) -> None:
    """Uids can be used again once they are trimmed. Goes red when the position of one shard counts for all."""
    [event_id] = books.emit("a")
    uid = books.uid(event_id)
    books.do(
        "insert into outbox.event (uid, shard, type, key) values (%s, outbox_internal.shard_of('b', null), 't', 'b')",
        uid,
    )
    books.do("insert into outbox.uid (uid, id) select uid, id from outbox.event where key = 'b'")
    shards = [shard for (shard,) in books.query("select shard from outbox.event order by id")]
    assert len(set(shards)) == 2
    for shard in shards:
        assert Erasure(books.database, {"uid": uid}).run()["phase"] == "refused"
        books.place("s", Position(books.tick()), [shard])
    assert Erasure(books.database, {"uid": uid}).run()["done"] == 2
