"""Events that are not erased: a relay may still deliver them, or the server would refuse to change them."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

import pytest
from psycopg import errors

from outbox_relay.domain.window import Position
from tests.support.database import Database
from tests.support.erasing import CONTENTS, Erasure, aerase
from tests.support.ledger import Ledger, ledger
from tests.support.sink_actions import call, register


@pytest.mark.parametrize("state", ["dead", "waiting", "held"])
async def test_an_event_with_a_row_is_refused_and_nothing_is_changed(books: Ledger, state: str) -> None:
    first, second = books.emit("k", "k", payload=b"kept")
    await books.park("s", books.row(second, state))
    await books.catch_up("s")
    ended = await aerase(books.database, "--key", "k")
    assert (ended.code, ended.out) == (1, "")
    assert f"event {books.uid(second)} is {state} in sink s\n" in ended.err
    assert "nothing was erased" in ended.err
    assert "outbox-relay dead discard" in ended.err
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2
    found = await aerase(books.database, "--uid", books.uid(second), "--json")
    assert (found.code, found.json["done"]) == (1, 0)
    assert found.json["undelivered"] == [{"uid": books.uid(second), "sink": "s", "state": state}]
    assert (await aerase(books.database, "--uid", books.uid(first))).code == 0
    assert books.query("select count(*) from outbox.erasure") == [(0,)]


async def test_a_row_whose_event_the_log_has_lost_is_refused(books: Ledger) -> None:
    [event_id] = books.emit("k")
    await books.park("s", books.row(event_id, "dead"))
    uid = books.uid(event_id)
    books.do("truncate outbox.event")
    for subject in (("--key", "k"), ("--uid", uid)):
        assert f"event {uid} is dead in sink s" in (await aerase(books.database, *subject)).err


async def test_a_row_of_a_sink_that_is_gone_is_erased(books: Ledger) -> None:
    [event_id] = books.emit("k")
    await books.park("s", books.row(event_id, "dead"))
    books.do("update outbox.delivery set sink = 'gone'")
    await books.catch_up("s")
    assert (await aerase(books.database, "--key", "k")).out == "1 event erased\n"
    assert books.query("select count(*) from outbox.delivery") == [(0,)]


async def test_an_event_that_a_position_has_not_passed_is_refused(books: Ledger) -> None:
    await books.catch_up("s")
    [event_id] = books.emit("k")
    assert Erasure(books.database, {"key": "k"}).run()["undelivered"] == [
        {"uid": books.uid(event_id), "sink": "s", "state": "pending"}
    ]
    await books.catch_up("s")
    assert Erasure(books.database, {"key": "k"}).run()["done"] == 1


async def test_a_type_that_a_sink_without_owner_does_not_take_is_not_refused(database: Database) -> None:
    async with ledger(database) as books:
        await books.register(("s", ["order.*"], "beginning"))
        books.emit("k", type="customer.created")
        [order] = books.emit("o", type="order.created")
        assert Erasure(database, {"key": "k"}).run()["done"] == 1
        assert Erasure(database, {"key": "o"}).run()["undelivered"][0]["uid"] == books.uid(order)


async def test_an_owner_of_earlier_patterns_may_still_deliver(database: Database) -> None:
    """Goes red when only the present patterns count."""
    async with ledger(database) as books:
        await books.register(("s", ["a.*"], "beginning"))
        await books.own("s")
        [event_id] = books.emit("k", type="a.x")
        register(database, "s", "b.*")
        assert Erasure(database, {"key": "k"}).run()["phase"] == "refused"
        await books.park("s", books.row(event_id))
        await books.catch_up("s")
        assert Erasure(database, {"key": "k"}).run()["undelivered"][0]["state"] == "waiting"


async def test_positions_count_as_the_owner_of_a_shard_has_written_them(books: Ledger) -> None:
    """An owner begins behind a position, and what another one writes late is not where it is. Goes red without."""
    late = Ledger(books.database, books.store)
    late.epochs = {"s": dict(books.epochs["s"])}
    books.emit("k")
    books.do("update outbox.shard set lease_until = clock_timestamp() - interval '1 second'")
    books.relay = uuid4()
    await books.own("s")
    await late.catch_up("s")
    assert Erasure(books.database, {"key": "k"}).run()["phase"] == "refused"
    books.do("update outbox.shard set owner = null")
    assert Erasure(books.database, {"key": "k"}).run()["done"] == 1


async def test_events_of_one_uid_in_two_shards_are_looked_at_in_both(books: Ledger) -> None:
    """Uids can be used again once they are trimmed. Goes red when the position of one shard counts for all."""
    [event_id] = books.emit("a")
    uid = books.uid(event_id)
    books.do(
        "with e as (insert into outbox.event (uid, shard, type, key) "
        "values (%s, outbox_internal.shard_of('b', null), 't', 'b') returning uid, id) "
        "insert into outbox.uid (uid, id) select e.uid, e.id from e",
        uid,
    )
    shards = [shard for (shard,) in books.query("select shard from outbox.event order by id")]
    assert len(set(shards)) == 2
    for shard in shards:
        assert Erasure(books.database, {"uid": uid}).run()["phase"] == "refused"
        await books.place("s", Position(await books.tick()), [shard])
    assert Erasure(books.database, {"uid": uid}).run()["done"] == 2


async def test_a_shard_without_position_or_row_is_refused(books: Ledger) -> None:
    books.emit("k")
    await books.catch_up("s")
    books.do("delete from outbox.progress")
    books.do("delete from outbox.shard")
    assert Erasure(books.database, {"key": "k"}).run()["phase"] == "refused"


async def test_a_log_of_another_cluster_is_refused(books: Ledger) -> None:
    books.emit("k")
    await books.catch_up("s")
    books.do("update outbox.meta set system_identifier = 1")
    ended = await aerase(books.database, "--key", "k")
    assert ended.code == 2
    assert "outbox-relay rebase" in ended.err


@pytest.mark.parametrize("tables", ["all tables", "table outbox.event"])
async def test_a_publication_of_updates_is_refused_before_anything_is_changed(books: Ledger, tables: str) -> None:
    books.emit("k", payload=b"kept")
    await books.catch_up("s")
    books.do(f"create publication dbz for {tables}")
    ended = await aerase(books.database, "--key", "k")
    assert ended.code == 2
    assert "publication dbz publishes updates of the log" in ended.err
    assert "alter publication dbz set (publish = 'insert')" in ended.err
    books.do("alter publication dbz set (publish = 'insert')")
    assert (await aerase(books.database, "--key", "k")).code == 0


@pytest.mark.parametrize("bad", ["actor => repeat('x', 256)", "reason => repeat('x', 2001)", "reason => ' '"])
async def test_words_that_the_audit_cannot_hold_are_refused_and_nothing_is_changed(books: Ledger, bad: str) -> None:
    books.emit("k", payload=b"kept")
    await books.catch_up("s")
    words = bad if "reason" in bad else f"{bad}, reason => 'r'"
    step = f"""select outbox.erase('{{"key": "k"}}', {words}, erasure_id => %s)"""
    with pytest.raises(errors.InvalidParameterValue):
        list(map(partial(books.do, step), (None, 1)))
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"]


@pytest.mark.parametrize("most", ["null", "0", "-1", "2147483647"])
@pytest.mark.parametrize("dry_run", ["null", "true"])
def test_odd_arguments_are_borne(database: Database, most: str, dry_run: str) -> None:
    call(database, f"select outbox.erase('{{\"key\": \"k\"}}', null, 'r', {dry_run}, {most})")
    with pytest.raises(errors.InvalidParameterValue, match="is not the number"):
        call(database, "select outbox.erase('{\"key\": \"k\"}', null, 'r', true, 1, -9223372036854775808)")
