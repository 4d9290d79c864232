"""The command erase: what it removes, what it refuses, and what it says."""

from __future__ import annotations

import json
import time
from uuid import uuid4

import pytest

from outbox_relay.domain.attempts import AttemptRecord
from tests.support.command import inside
from tests.support.erasing import CONTENTS, Erasure, erase, places_of
from tests.support.ledger import Ledger

HUSK = (b"", None, None, "application/x-erased")


# -- what is removed ----------------------------------------------------------------------------------------------


def plant(books: Ledger, mark: str) -> list[int]:
    """Emit two events full of `mark`, of which one is discarded, with everything that is recorded meanwhile."""
    headers = json.dumps({"trace": mark})
    dead, other = books.emit(mark, mark, payload=(mark * 200).encode(), headers=headers)
    books.do("select outbox.emit('t', %s, key => %s)", json.dumps({"name": mark}), mark)
    books.park("s", *(books.row(each, "dead", error=f"400: {mark}", attempts=3) for each in (dead, other)))
    said, detail = f"400: {mark}", {"answer": mark}
    failed = AttemptRecord(dead, books.uid(dead), 1, "failed", time.monotonic(), error=said, detail=detail)
    books.store.settle("s", books.relay, {}, [], {}, records=[failed], relay="r")
    books.do("update outbox.sink set last_error = %s, last_error_at = clock_timestamp()", f"400: {mark}")
    books.do("select * from outbox.set_paused('s', true, 'me', %s)", f"customer {mark} asked")
    books.do("analyze")
    books.catch_up("s")
    wanted = json.dumps({"key": mark, "error": mark})
    books.do("select * from outbox.discard_deliveries(%s, reason => %s)", wanted, f"{mark} asked")
    return [dead, other]


def test_nothing_of_an_erased_event_is_left_in_the_database(books: Ledger) -> None:
    mark = f"Mark{uuid4().hex}"
    plant(books, mark)
    here = places_of(books.database, mark)
    assert {"audit", "discarded", "sink", "pg_statistic"} < here
    assert any(name.startswith("event_2") for name in here)
    assert any(name.startswith("attempt_2") for name in here)
    ended = erase(books.database, "--key", mark, "--json")
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


def test_one_event_is_erased_by_its_uid(books: Ledger) -> None:
    one, other = books.emit("k", "k", payload=b"{}")
    uid = books.uid(one)
    books.catch_up("s")
    erasure = Erasure(books.database, {"uid": uid})
    erasure.step()
    assert uid not in str(books.query("select * from outbox.erasure"))
    assert erasure.run()["done"] == 1
    assert books.query("select id from outbox.event where key is not null") == [(other,)]
    assert uid not in str(books.query("select * from outbox.audit"))
    again = erase(books.database, "--uid", uid)
    assert (again.code, again.out) == (0, "0 events erased\n")


# -- the command --------------------------------------------------------------------------------------------------


def test_a_dry_run_counts_and_a_question_is_asked(books: Ledger) -> None:
    books.emit("k", "k", payload=b"kept")
    books.catch_up("s")
    dry = erase(books.database, "--key", "k", "--dry-run", "--json")
    assert dry.json == {"matched": 2, "exact": True}
    assert (erase(books.database, "--key", "k", "--dry-run")).out == "2 events can be erased\n"
    asked = ("erase", "--key", "k", "--reason", "r", "--dsn", books.database.dsn)
    refused = inside(*asked)
    assert refused.code == 2
    assert "Erase payload, headers and key of 2 events? They cannot be restored." in refused.err
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2
    assert books.query("select count(*) from outbox.audit") == [(0,)]


def test_a_key_with_many_events_takes_bounded_steps(books: Ledger) -> None:
    books.emit(*["k"] * 450)
    big = books.emit("k", "k", "k", payload=b"x" * 100)
    books.do("alter table outbox.event alter payload set storage external")
    books.do("update outbox.event set payload = convert_to(repeat('x', 5000000), 'UTF8') where id = any(%s)", big)
    books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"})
    sizes = list[int]()
    erasure.until("erasing")
    while erasure.step() != "done":
        sizes.append(erasure.last["done"] - sum(sizes))
    assert [size for size in sizes if size] == [200, 200, 52, 1]


@pytest.mark.fence("an erased event would move to a shard whose position has not passed it")
def test_an_event_keeps_its_shard_and_all_that_says_nothing_of_it(books: Ledger) -> None:
    books.emit("customer-7", payload=b"secret", headers='{"a": "b"}')
    kept = "select xid::text, id, shard, uid, type, deliver_at, created_at, emitter from outbox.event"
    before = books.query(kept)
    books.catch_up("s")
    assert erase(books.database, "--key", "customer-7").code == 0
    assert books.query(kept) == before
    assert books.query(CONTENTS) == [HUSK]
