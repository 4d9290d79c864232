"""Status: what counts as backlog, and what people are told besides."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest

from outbox_relay import admin
from outbox_relay.domain.window import BEGINNING, Position, Tick
from tests.support.command import inside
from tests.support.database import Database
from tests.support.ledger import ALL, Ledger, emit, ledger

BULK = """insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('k' || g %% 500, null), gen_random_uuid(), %s, 'k' || g %% 500, '{}', 'application/json'
  from generate_series(1, %s) g"""
LOGGED = "select id, shard, xid::text::bigint from outbox.event"


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with positions to be set by hand."""
    with ledger(database) as found:
        yield found


def sink(books: Ledger, name: str = "s") -> dict[str, Any]:
    """Return the status of one sink."""
    return (admin.status(books.store))["sinks"][name]


class Writers:
    """Connections that emit in long, short, rolled back and half rolled back transactions, in one thread."""

    def __init__(self, database: Database, stack: ExitStack, seed: int) -> None:
        self.rng = random.Random(seed)
        self.connections = [stack.enter_context(database.connect()) for _ in range(8)]

    def work(self, steps: int) -> None:
        """Do `steps` things, one after another; transactions stay open in between."""
        for _ in range(steps):
            connection = self.rng.choice(self.connections)
            match self.rng.choices(["emit", "savepoint", "commit", "rollback"], [6, 1, 2, 1])[0]:
                case "emit":
                    emit(connection, f"k{self.rng.randrange(200)}")
                case "savepoint":
                    with connection.transaction(force_rollback=self.rng.random() < 0.5):
                        emit(connection, f"k{self.rng.randrange(200)}")
                case "commit":
                    connection.commit()
                case _:
                    connection.rollback()


def visible(xid: int, tick: Tick) -> bool:
    """Return the result of pg_visible_in_snapshot."""
    return xid < tick.xmax and xid not in tick.running


def undone(logged: list[tuple[int, int, int]], place: dict[int, Position]) -> set[int]:
    """Return the ids that no position covers, by the definition: not visible in A, nor in B up to the last id done."""
    left: set[int] = set()
    for event_id, shard, xid in logged:
        a, b, last = place[shard]
        if not visible(xid, a) and not (b is not None and visible(xid, b) and event_id <= last):
            left.add(event_id)
    return left


def positions(rng: random.Random, ticks: list[Tick], most_id: int) -> dict[int, Position]:
    """Return shards spread over a few positions: between windows, at their beginning, and anywhere inside."""
    some: list[Position] = []
    for _ in range(rng.randint(1, 6)):
        a, b = sorted(rng.sample(range(len(ticks)), 2))
        last = rng.choice([0, ticks[a].seq, ticks[b].seq, rng.randint(0, most_id), rng.randint(0, most_id)])
        some.append(rng.choice([Position(ticks[a]), Position(ticks[a], ticks[b], last)]))
    return {shard: rng.choice(some) for shard in ALL}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_backlog_is_what_no_position_covers(books: Ledger, seed: int) -> None:
    books.register(("s", ["*"], "beginning"))
    ticks = [BEGINNING]
    place: dict[int, Position] = {}
    kinds: set[str] = set()
    with ExitStack() as stack:
        writers = Writers(books.database, stack, seed)
        for _ in range(25):
            writers.work(30)
            ticks.append(books.tick())
            place = positions(writers.rng, ticks, ticks[-1].seq + 2)
            for position in set(place.values()):
                books.place("s", position, [s for s in ALL if place[s] == position])
            logged: list[Any] = books.query(LOGGED)
            left = undone(logged, place)
            found = sink(books)
            assert (found["backlog"], found["backlog_exact"]) == (len(left), True)
            kinds |= {_kind(place[shard], event_id, xid) for event_id, shard, xid in logged if event_id in left}
            assert left <= read_by_a_rebase(logged, upto(books))
    assert kinds == {"late for A", "rest", "late for B", "above B"}
    logged = books.query(LOGGED)
    left, before = undone(logged, place), upto(books)
    books.query("select outbox.rebase()")
    assert upto(books) == before
    found = sink(books)
    again = read_by_a_rebase(logged, before)
    assert (found["backlog"], found["backlog_exact"]) == (len(again), True)
    assert left <= again


def upto(books: Ledger) -> dict[int, int]:
    """Shard → the id up to which the log is settled without a gap."""
    return dict(books.query("select unnest(u.shards), u.upto_id from outbox_internal.settled_upto('s') u"))


def read_by_a_rebase(logged: list[tuple[int, int, int]], settled: dict[int, int]) -> set[int]:
    """Return the ids that are read after a rebase: whatever their transaction numbers mean."""
    return {event_id for event_id, shard, _ in logged if event_id > settled[shard]}


def _kind(position: Position, event_id: int, xid: int) -> str:
    """Return the part of the definition by which an event is left."""
    a, b, last = position
    if b is None or visible(xid, b) or event_id > last:
        return "late for A" if event_id <= a.seq else "rest"
    return "late for B" if event_id <= b.seq else "above B"


def test_rows_count_by_their_state(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"), ("other", ["*"], "beginning"))
    books.own("s")
    ids = books.emit(*"abcdefgh")
    far = "2100-01-01T00:00:00Z"
    books.schedule("i", far)
    [due_since] = books.emit("j", deliver_at="2020-01-01T00:00:00Z")
    rows = [
        books.row(ids[0], due_in=0.0),
        books.row(ids[1], due_in=3600.0, attempts=3),
        books.row(ids[2], "held"),
        books.row(ids[3], "held"),
        books.row(ids[4], "dead", attempts=30),
        books.row(ids[5], lease=books.relay, lease_for=60.0, due_in=0.0),
        books.row(due_since, ordered=False),
    ]
    books.park("s", *rows)
    before = sink(books)
    books.catch_up("s")
    after = sink(books)
    for found, in_log in ((before, 2), (after, 0)):
        counts = {name: found[name] for name in ("waiting", "held", "dead", "scheduled", "backlog")}
        assert counts == {"waiting": 4, "held": 2, "dead": 1, "scheduled": 1, "backlog": 6 + in_log}
    assert (sink(books, "other"))["backlog"] == 9
    assert (sink(books, "other"))["scheduled"] == 1


def test_what_is_scheduled_is_no_backlog_until_it_is_due_and_then_ages_from_there(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"))
    books.own("s")
    for key in "ab":
        books.schedule(key, "2100-01-01T00:00:00Z")
    found = sink(books)
    assert (found["backlog"], found["scheduled"], found["waiting"], found["oldest_seconds"]) == (0, 2, 0, 0.0)
    books.do("update outbox.scheduled set deliver_at = now() - interval '10 s', created_at = now() - interval '1 day'")
    books.do("select outbox_internal.enter_scheduled(10, '-infinity', 0)")
    found = sink(books)
    assert (found["backlog"], found["scheduled"], found["waiting"]) == (2, 0, 0)
    assert found["oldest_seconds"] < 40


def test_ten_thousand_are_counted_and_more_are_estimated(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"), ("some", ["rare.*"], "beginning"))
    books.do(BULK, "test.event", 10_000)
    found = sink(books)
    assert (found["backlog"], found["backlog_exact"]) == (10_000, True)
    books.place("s", Position(books.tick()), range(5))
    books.do(BULK, "rare.event", 1_000)
    books.do(BULK, "test.event", 24_000)
    found = sink(books)
    left = undone(books.query(LOGGED), books.store.positions("s", ALL))
    assert not found["backlog_exact"]
    assert len(left) * 0.9 < found["backlog"] < len(left) * 1.1
    assert (sink(books, "some"))["backlog"] == 1_000
    assert (sink(books, "some"))["backlog_exact"]


def test_pause_circuit_last_error_and_shards_without_an_owner_are_shown(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"))
    books.own("s", 60)
    books.store.record_circuit("s", "half-open", "broker away", 8, 0)
    assert admin.pause(books.store, "s")
    found = sink(books)
    assert 0 <= found["circuit_seconds"] < 30
    shown = {name: found[name] for name in ("paused", "paused_reason", "circuit", "in_flight_limit", "last_error")}
    assert found["unowned"] == 4
    assert shown == {
        "paused": True,
        "paused_reason": None,
        "circuit": "half-open",
        "in_flight_limit": 8,
        "last_error": "broker away",
    }


def test_an_error_that_is_over_is_null_and_has_its_times(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"))
    assert last_error(books) == (None, None, None)
    books.store.record_mended("s", own=True)
    assert last_error(books) == (None, None, None)
    books.store.record_circuit("s", "open", "broker away", None, 0)
    books.store.record_mended("s", own=True)
    error, at, mended = last_error(books)
    assert (error, mended) == ("broker away", None), "the circuit is open"
    books.store.record_circuit("s", "closed", None, None, 0)
    [row] = books.store.sinks(["s"])
    assert row.last_error_open
    books.store.record_mended("s", own=False)
    assert (last_error(books))[0] == "broker away", "a relay may still meet it"
    books.store.record_mended("s", own=True)
    error, at_then, mended = last_error(books)
    assert (error, at_then) == (None, at)
    assert mended is not None
    assert mended >= str(at)
    assert (sink(books))["last_error_mended_seconds_ago"] < 30
    assert (sink(books))["mended_error"] == "broker away"
    [row] = books.store.sinks(["s"])
    assert not row.last_error_open
    books.store.record_circuit("s", "closed", "topic a: unknown", None, 0)
    assert (last_error(books))[::2] == ("topic a: unknown", None)
    books.do("update outbox.sink set last_error_at = last_error_at - interval '4 minutes'")
    books.do("update outbox.sink set last_error_mended_at = last_error_mended_at - interval '5 minutes'")
    books.store.record_mended("s", own=False)
    assert (last_error(books))[0] is None, "no relay has met it for minutes"


def last_error(books: Ledger) -> tuple[str | None, str | None, str | None]:
    """Return the last error of sink s, its time and the time of its end."""
    found = sink(books)
    return found["last_error"], found["last_error_at"], found["last_error_mended_at"]


def test_relays_that_are_alive_are_listed_with_their_shards(books: Ledger) -> None:
    books.register(("s", ["*"], "beginning"), ("t", ["*"], "beginning"))
    silent, owner, gone = (Ledger(books.database, books.store) for _ in range(3))
    books.live("b", "s", "t")
    books.own("s", 20)
    silent.live("a", "t")
    owner.live("c", "s")
    owner.own("s", 30, lease_seconds=600)
    gone.live("d", "s")
    gone.own("s", lease_seconds=-1)
    old = "update outbox.relay set seen_at = seen_at - interval '50 s' where name = any (%s)"
    books.do(old, ["c", "d"])
    relays = (admin.status(books.store))["relays"]
    seen = [relay.pop("seen_seconds_ago") for relay in relays]
    assert relays == [
        {"name": "a", "version": "1.2.3", "stale": False, "shards": {"t": 0}},
        {"name": "b", "version": "1.2.3", "stale": False, "shards": {"s": 20, "t": 0}},
        {"name": "c", "version": "1.2.3", "stale": False, "shards": {"s": 30}},
    ]
    assert seen[0] < 30 < 50 <= seen[2] < 80


def test_a_part_that_is_locked_is_named_and_hides_no_other(books: Ledger) -> None:
    books.register(("s", ["order.*"], "beginning"))
    books.live("a", "s")
    books.emit("k", type="user.deleted")
    with books.database.connect() as other:
        other.execute("lock table outbox.replay in access exclusive mode")
        ended = inside("status", "--json", "--dsn", books.database.dsn)
    found = ended.json
    assert ended.code == 1
    assert found["replays"] is None
    assert [each["part"] for each in found["not_answered"]] == ["replays"]
    assert found["not_answered"][0]["reason"] in ended.err
    assert (found["sinks"]["s"]["backlog"], found["unrouted"], len(found["relays"])) == (0, ["user.deleted"], 1)
