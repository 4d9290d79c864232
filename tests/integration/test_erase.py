"""The command erase: what it removes, what it refuses, and what it says."""

from __future__ import annotations

import asyncio
import json
import time
from uuid import UUID, uuid4

import pytest

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside, outbox_relay
from tests.support.database import Database
from tests.support.erasing import CONTENTS, Erasure, aerase, erase, places_of
from tests.support.ledger import Ledger
from tests.support.roles import new_role
from tests.support.sink_actions import call

HUSK = (b"", None, None, "application/x-erased")


# -- what is removed ----------------------------------------------------------------------------------------------


async def plant(books: Ledger, mark: str) -> list[int]:
    """Emit two events full of `mark`, of which one is discarded, with everything that is recorded meanwhile."""
    headers = json.dumps({"trace": mark})
    dead, other = books.emit(mark, mark, payload=(mark * 200).encode(), headers=headers)
    books.do("select outbox.emit('t', %s, key => %s)", json.dumps({"name": mark}), mark)
    await books.park("s", *(books.row(each, "dead", error=f"400: {mark}", attempts=3) for each in (dead, other)))
    said, detail = f"400: {mark}", {"answer": mark}
    failed = AttemptRecord(dead, books.uid(dead), 1, "failed", time.monotonic(), error=said, detail=detail)
    await books.store.settle("s", books.relay, {}, [], {}, records=[failed], relay="r")
    books.do("update outbox.sink set last_error = %s, last_error_at = clock_timestamp()", f"400: {mark}")
    books.do("select * from outbox.set_paused('s', true, 'me', %s)", f"customer {mark} asked")
    books.do("analyze")
    await books.catch_up("s")
    wanted = json.dumps({"key": mark, "error": mark})
    books.do("select * from outbox.discard_deliveries(%s, reason => %s)", wanted, f"{mark} asked")
    return [dead, other]


async def test_nothing_of_an_erased_event_is_left_in_the_database(books: Ledger) -> None:
    mark = f"Mark{uuid4().hex}"
    await plant(books, mark)
    here = places_of(books.database, mark)
    assert {"audit", "discarded", "sink", "pg_statistic"} < here
    assert any(name.startswith("event_2") for name in here)
    assert any(name.startswith("attempt_2") for name in here)
    ended = await aerase(books.database, "--key", mark, "--json")
    assert (ended.code, ended.err, ended.json) == (0, "", {"done": 3, "left": 0, "archives": []})
    books.do("analyze")
    assert places_of(books.database, mark) == set()
    assert books.query(CONTENTS) == [HUSK] * 3
    [(reason, *_), *rest] = books.query(
        "select reason, filter, count, actor from outbox.audit where action like 'erase%%' order by id"
    )
    assert (reason, len(rest)) == ("asked for", 1)
    [(rows, count)] = books.query("select filter -> 'rows', count from outbox.audit where action = 'erase in audit'")
    assert len(rows) == count == 2


async def test_a_key_is_erased_from_the_kind_of_an_error_that_an_action_has_named(books: Ledger) -> None:
    """Numbers of the key are not there, but the rest may say who it is."""
    books.emit("anna7@example.com")
    await books.catch_up("s")
    wanted = json.dumps({"kind": "answered N: no mailbox annaN@example.com"})
    books.query("select audit_id from outbox.retry_deliveries(%s::jsonb)", wanted)
    assert (await aerase(books.database, "--key", "anna7@example.com")).code == 0
    [(kind,)] = books.query("select filter ->> 'kind' from outbox.audit where action = 'dead retry'")
    assert kind.startswith("answered N: no mailbox hash:")
    assert "anna" not in kind


async def test_other_events_of_the_shard_stay_as_they_are(books: Ledger) -> None:
    first, same = books.emit("a", "b", payload=b"kept")
    books.do("update outbox.event set shard = 7")
    books.do("update outbox.event set shard = outbox_internal.shard_of('a', uid)")
    await books.catch_up("s")
    assert (await aerase(books.database, "--key", "a")).out == "1 event erased\n"
    assert books.query("select id, payload from outbox.event order by id") == [(first, b""), (same, b"kept")]


async def test_an_event_keeps_its_shard_and_all_that_says_nothing_of_it(books: Ledger) -> None:
    books.emit("customer-7", payload=b"secret", headers='{"a": "b"}')
    kept = "select xid::text, id, shard, uid, type, deliver_at, created_at, emitter from outbox.event"
    before = books.query(kept)
    await books.catch_up("s")
    assert (await aerase(books.database, "--key", "customer-7")).code == 0
    assert books.query(kept) == before
    assert books.query(CONTENTS) == [HUSK]


async def test_one_event_is_erased_by_its_uid(books: Ledger) -> None:
    one, other = books.emit("k", "k", payload=b"{}")
    uid = books.uid(one)
    await books.catch_up("s")
    erasure = Erasure(books.database, {"uid": uid})
    erasure.step()
    assert uid not in str(books.query("select * from outbox.erasure"))
    assert erasure.run()["done"] == 1
    assert books.query("select id from outbox.event where key is not null") == [(other,)]
    assert uid not in str(books.query("select * from outbox.audit"))
    again = await aerase(books.database, "--uid", uid)
    assert (again.code, again.out) == (0, "0 events erased\n")


async def test_what_is_recorded_of_an_emptied_event_is_erased_by_its_uid(books: Ledger) -> None:
    [event_id] = books.emit("k")
    uid = books.uid(event_id)
    record = AttemptRecord(event_id, uid, 1, "failed", time.monotonic(), error="secret", detail={"answer": "secret"})
    await books.store.settle("s", books.relay, {}, [], {}, records=[record], relay="r")
    await books.catch_up("s")
    books.do("truncate outbox.event")
    ended = await aerase(books.database, "--uid", uid)
    assert (ended.code, ended.out) == (0, "0 events erased\n")
    assert books.query("select error, detail from outbox.attempt") == [(None, None)]


async def test_statistics_of_a_key_go_although_no_row_is_left(books: Ledger) -> None:
    """ANALYZE keeps statistics of a table without rows. Goes red without the row that it is shown."""
    events = books.emit(*["customer-7"] * 20)
    await books.park("s", *(books.row(each, "dead") for each in events))
    books.do("analyze outbox.delivery")
    books.do("delete from outbox.delivery")
    books.do("analyze outbox.delivery")
    assert places_of(books.database, "customer-7") >= {"pg_statistic"}
    await books.catch_up("s")
    assert (await aerase(books.database, "--key", "customer-7")).code == 0
    assert places_of(books.database, "customer-7") == set()
    assert books.query("select count(*) from outbox.delivery") == [(0,)]


async def test_statistics_that_an_owner_asked_for_are_named(books: Ledger) -> None:
    books.emit("a", "a", "b", "b")
    await books.catch_up("s")
    books.do("alter table outbox.event_default alter key set statistics 10")
    books.do("alter table outbox.event alter key set statistics 10")
    books.do("create index on outbox.event (lower(key))")
    books.do("analyze outbox.event")
    ended = await aerase(books.database, "--key", "a")
    assert (ended.code, ended.out) == (0, "2 events erased\n")
    assert "planner statistics on event.key, event_2" in ended.err
    assert "_lower_idx" in ended.err


# -- the command --------------------------------------------------------------------------------------------------


async def test_a_dry_run_counts_and_a_question_is_asked(books: Ledger) -> None:
    books.emit("k", "k", payload=b"kept")
    await books.catch_up("s")
    dry = await aerase(books.database, "--key", "k", "--dry-run", "--json")
    assert dry.json == {"matched": 2, "exact": True}
    assert (await aerase(books.database, "--key", "k", "--dry-run")).out == "2 events can be erased\n"
    asked = ("erase", "--key", "k", "--reason", "r", "--dsn", books.database.dsn)
    refused = await asyncio.to_thread(inside, *asked)
    assert refused.code == 2
    assert "Erase payload, headers and key of 2 events? They cannot be restored." in refused.err
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2
    assert books.query("select count(*) from outbox.audit") == [(0,)]


async def test_nothing_to_do_is_done_and_a_uid_that_is_not_known_is_not_found(books: Ledger) -> None:
    ended = await aerase(books.database, "--key", "nothing", "--json")
    assert (ended.code, ended.json) == (0, {"done": 0, "left": 0, "archives": []})
    unknown = str(UUID(int=7))
    ended = await aerase(books.database, "--uid", unknown)
    assert (ended.code, ended.err) == (3, f"no event {unknown} is known\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the arguments --key --uid is required"),
        (("--key", "k", "--uid", str(UUID(int=7))), "not allowed with argument"),
        (("--key", "ü" * 600), "at most 1024 bytes"),
        (("--uid", "x"), "should be a UUID"),
    ],
)
def test_wrong_usage_is_said(database: Database, arguments: tuple[str, ...], words: str) -> None:
    ended = outbox_relay("erase", "--reason", "r", "--yes", *arguments, "--dsn", database.dsn)
    assert ended.code == 2
    assert words in ended.err


@pytest.mark.parametrize(
    "subject", ["null", "[]", "{}", '{"key": null}', '{"key": 1}', '{"uid": "x"}', '{"key": "a", "uid": "b"}', '"k"']
)
def test_a_subject_that_is_none_is_refused(database: Database, subject: str) -> None:
    with pytest.raises(Exception, match=r"subject of an erasure|key must be a string"):
        call(database, "select * from outbox.erase(%s, reason => 'r')", subject)


def test_only_operators_erase(database: Database) -> None:
    with new_role(database, "act") as act, new_role(database, "read") as read:
        migrate(database.dsn, grants={"operate": [act], "read": [read]})
        assert erase(database, "--key", "k", user=act).code == 0
        ended = erase(database, "--key", "k", user=read)
        assert ended.code == 2
        assert "--grant-operate" in ended.err


async def test_an_erasure_is_continued_by_its_own_role_and_subject_alone(books: Ledger) -> None:
    books.emit("k", "other")
    await books.catch_up("s")
    mine = Erasure(books.database, {"key": "k"})
    assert mine.step() == "erasing"
    other = Erasure(books.database, {"key": "other"}, number=mine.number)
    with pytest.raises(Exception, match="is not the number of an erasure of today"):
        other.step()
    assert mine.run()["done"] == 1


async def test_ids_that_no_event_has_are_passed_over(books: Ledger) -> None:
    books.emit("k")
    books.do("select setval('outbox.event_id_seq', 1000000000000)")
    books.emit("k")
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"}, most_ids=1000)
    steps = 0
    while erasure.step() != "done":
        steps += 1
    assert erasure.last["done"] == 2
    assert steps < 10


async def test_a_key_with_many_events_takes_bounded_steps(books: Ledger) -> None:
    books.emit(*["k"] * 450)
    big = books.emit("k", "k", "k", payload=b"x" * 100)
    books.do("alter table outbox.event alter payload set storage external")
    books.do("update outbox.event set payload = convert_to(repeat('x', 5000000), 'UTF8') where id = any(%s)", big)
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"})
    sizes = list[int]()
    erasure.until("erasing")
    while erasure.step() != "done":
        sizes.append(erasure.last["done"] - sum(sizes))
    assert [size for size in sizes if size] == [200, 200, 52, 1]
