"""The rules of the tick and of the window, one scenario each, with transactions held at the points that matter.

Where a rule was found by breaking it, the scenario also shows what the broken rule loses.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from outbox_relay.domain.event import SHARDS, StoredEvent, pop_scan_end
from outbox_relay.domain.routing import like_pattern
from outbox_relay.domain.window import BEGINNING, MAX_ID, Position, Tick, nothing_new
from outbox_relay.postgres.log import WindowRequest
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.store import Store
from tests.property.follower import AMPLE_BYTES, Follower, Looking, WithoutList, WithoutRange, opened
from tests.property.writers import TABLES
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("window rules")

MIB = 1 << 20
EVERY_SHARD = list(range(SHARDS))
PLAIN: dict[str, Any] = {}
ROUNDS_OF_TICKS = 2
Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def database(postgres: PostgresServer, template: str) -> Generator[Database]:
    """Yield one log for all scenarios: each reads from its own beginning. No transaction of the server intervenes."""
    postgres.create_database("window_rules", template=template)
    with postgres.connect() as connection:
        connection.execute("alter system set autovacuum = off")
        connection.execute("select pg_reload_conf()")
        yield Database(postgres, "window_rules")
        connection.execute("alter system reset autovacuum")
        connection.execute("select pg_reload_conf()")
    postgres.drop_database("window_rules")


@pytest.fixture
def store(database: Database) -> Generator[Store]:
    with opened(database.dsn) as store:
        yield store


def value(connection: Connection, query: str, *parameters: object) -> Any:
    """Return the first column of the only row."""
    row = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def emit(connection: Connection, kind: str = "t", *, key: str | None = None, payload: bytes = b"p") -> int:
    """Emit in the connection's transaction; returns the event's id."""
    uid = value(connection, "select outbox.emit_raw(%s, %s, key => %s)", kind, payload, key)
    return value(connection, "select id from outbox.event where uid = %s", uid)


def emit_and_commit(database: Database, kind: str = "t", *, key: str | None = None, payload: bytes = b"p") -> int:
    """Emit in a transaction of its own; returns the event's id."""
    with database.connect() as connection:
        return emit(connection, kind, key=key, payload=payload)


def xid(connection: Connection) -> int:
    """Return the xid of the connection's transaction, which has one."""
    return int(value(connection, "select pg_current_xact_id()::text"))


# -- what is pending ----------------------------------------------------------------------------------------------


@contextmanager
def newest(database: Database) -> Generator[tuple[Connection, int, Callable[[Tick], bool]]]:
    """Begin a transaction that emits: return its connection, the event's id, and True if no tick lists it."""
    with database.connect() as connection:
        event = emit(connection)
        number = xid(connection)
        yield connection, event, lambda tick: tick.xmax <= number


@pytest.mark.parametrize(("kind", "lost"), [(Follower, False), (WithoutRange, True), (WithoutList, False)])
def test_transaction_above_xmax_is_a_latecomer(
    database: Database, store: Store, kind: type[Follower], lost: bool
) -> None:
    follower = kind(store, position=Position(quiet(database)))
    with newest(database) as (_, event, hidden):
        tick = follower.follow()
        assert hidden(tick)
    another = emit_and_commit(database)
    follower.follow()
    assert follower.ids == ([another] if lost else [event, another])


@pytest.mark.parametrize(("kind", "lost"), [(Follower, False), (WithoutRange, False), (WithoutList, True)])
def test_transaction_that_the_snapshot_lists_is_a_latecomer(
    database: Database, store: Store, kind: type[Follower], lost: bool
) -> None:
    follower = kind(store, position=Position(quiet(database)))
    with newest(database) as (_, event, hidden):
        later = emit_and_commit(database)
        tick = follower.follow()
        assert not hidden(tick)
    another = emit_and_commit(database)
    follower.follow()
    assert follower.ids == ([later, another] if lost else [later, event, another])


def test_long_range_above_xmax_is_pending_to_its_end(database: Database, store: Store) -> None:
    savepoints = 5000
    with database.connect() as connection:
        connection.execute(TABLES)
    follower = Follower(store, position=Position(quiet(database)), most_rows=3)
    with database.connect() as storm:
        first = emit(storm)
        storm.execute("select storm(%s)", (savepoints,))
        with newest(database) as (_, second, hidden):
            tick = follower.follow()
            assert hidden(tick)
            assert tick.next_xid - tick.xmax > savepoints
        third = emit_and_commit(database)
        follower.follow()
        assert follower.ids == [second, third]
    follower.follow()
    assert follower.ids == [second, third, first]


def test_transaction_that_rolls_back_leaves_nothing(database: Database, store: Store) -> None:
    follower = Follower(store, position=Position(quiet(database)))
    with newest(database) as (connection, _, _hidden):
        follower.follow()
        connection.rollback()
    with database.connect() as connection:
        kept = emit(connection)
        with connection.transaction(force_rollback=True):
            emit(connection)
    follower.follow()
    assert follower.ids == [kept]


# -- how a tick is taken ------------------------------------------------------------------------------------------


def two_reads(database: Database, between: Callable[[], object]) -> Tick:
    """Take a tick by hand, and do something between its two reads."""
    with database.connect(autocommit=True) as connection:
        # As outbox_internal.tick() reads it: a sequence that has given out nothing yet is at 0.
        seq = value(connection, "select coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0)")
        between()
        snapshot, xmax = connection.execute(
            "select pg_current_snapshot()::text, pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ).fetchall()[0]
    return Tick(seq, snapshot, xmax)


def quiet(database: Database) -> Tick:
    """Take a tick while no transaction runs anywhere on the server."""

    def fact() -> Tick | None:
        with database.connect(autocommit=True) as connection:
            row = connection.execute("select seq, snapshot::text, next_xid from outbox_internal.tick()").fetchone()
        assert row is not None
        tick = Tick(*row)
        return None if tick.has_pending else tick

    found = until(fact, seconds=10, what="no transaction runs")
    assert found is not None
    return found


def test_tick_judged_empty_must_not_replace_the_old_one(database: Database, store: Store) -> None:
    a = quiet(database)
    committed: list[int] = []
    b = two_reads(database, lambda: committed.append(emit_and_commit(database)))
    assert nothing_new(a, b)
    stands = Follower(store, position=Position(a))
    stands.read_to(b)
    assert stands.position == Position(a)
    stands.follow()
    assert stands.ids == committed
    advanced = Follower(store, position=Position(b))
    advanced.follow()
    assert advanced.ids == [], "the event lies above the sequence of the older tick and below that of the newer"


def test_tick_ahead_of_the_ids_given_out_would_lose_events(database: Database, store: Store) -> None:
    ahead = quiet(database)
    ahead = Tick(ahead.seq + 3, ahead.snapshot, ahead.next_xid)
    events = [emit_and_commit(database) for _ in range(5)]
    follower = Follower(store, position=Position(ahead))
    follower.follow()
    assert follower.ids == events[3:]


def test_tick_is_never_ahead_of_the_ids_given_out(database: Database) -> None:
    """While nextval() writes its WAL record, the sequence's row says 32 more than was given out.

    A tick that reads the row is ahead once in some 200,000 here, so its text is looked at as well.
    """
    with database.connect() as connection:
        source: str = value(connection, "select prosrc from pg_proc where oid = 'outbox_internal.tick'::regproc")
    source = re.sub("--.*", "", source)
    assert set(re.findall(r"\w*last_value", source)) == {"pg_sequence_last_value"}
    burst = "select count(nextval('outbox.event_id_seq')) from generate_series(1, 200000)"
    ticks = """
        do $$ declare taken bigint; begin
            for n in 1..20000 loop
                taken := (select seq from outbox_internal.tick());
                if taken > pg_sequence_last_value('outbox.event_id_seq') then
                    raise exception 'tick % is ahead', taken;
                end if;
            end loop;
        end $$"""
    ended = threading.Event()

    def give_out() -> None:
        with database.connect(autocommit=True) as connection:
            while not ended.is_set():
                connection.execute(burst)

    with ThreadPoolExecutor(1) as pool, database.connect(autocommit=True) as connection:
        giving = pool.submit(give_out)
        try:
            for _ in range(ROUNDS_OF_TICKS):
                connection.execute(ticks)
        finally:
            ended.set()
        giving.result()


def test_event_above_the_sequence_of_b_that_b_shows_is_read_once(database: Database, store: Store) -> None:
    follower = Follower(store, position=Position(quiet(database)))
    first = emit_and_commit(database)
    committed: list[int] = []
    b = two_reads(database, lambda: committed.append(emit_and_commit(database)))
    assert committed[0] > b.seq
    follower.read_to(b)
    assert follower.ids == [first, *committed]
    last = emit_and_commit(database)
    follower.follow()
    assert follower.ids == [first, *committed, last]


def test_last_piece_has_no_upper_end(database: Database, store: Store) -> None:
    follower = Follower(store, position=Position(quiet(database)), most_span=1, most_rows=2)
    many: list[int] = []
    b = two_reads(database, lambda: many.extend(emit_and_commit(database) for _ in range(5)))
    follower.position = follower.position.opened(b)
    while follower.position.b is not None:
        follower.read_piece()
    assert follower.ids == many
    assert {piece.upto for piece, _ in follower.reads} == {MAX_ID}


def test_tick_refuses_a_transaction_that_has_an_xid(database: Database) -> None:
    with database.connect() as connection:
        xid(connection)
        with pytest.raises(psycopg.errors.RaiseException, match="transaction of its own"):
            connection.execute("select outbox_internal.tick()")


def test_next_xid_is_read_once_per_transaction(database: Database, store: Store) -> None:
    """Why a tick is never sent in one transaction with another statement, nor pipelined with one: age() remembers."""
    with database.connect() as ticking, newest(database) as (_, _, _hidden):
        ticking.execute("select outbox_internal.tick()")
        with newest(database) as (late, event, hidden):
            stale = Tick(
                *ticking.execute("select seq, snapshot::text, next_xid from outbox_internal.tick()").fetchall()[0]
            )
            fresh = (store.tick()).tick
            assert hidden(stale)
            assert hidden(fresh)
            assert stale.next_xid <= xid(late) < fresh.next_xid
    lost, kept = Follower(store, position=Position(stale)), Follower(store, position=Position(fresh))
    lost.follow()
    kept.follow()
    assert event in kept.ids
    assert event not in lost.ids


def test_store_ticks_in_a_transaction_of_its_own(database: Database, store: Store) -> None:
    for _ in range(5):
        with newest(database) as (connection, _, hidden):
            tick = (store.tick()).tick
            assert hidden(tick)
            assert xid(connection) < tick.next_xid


def id_without_xid(connection: Connection) -> int:
    """Take an id in a transaction without an xid. A call that logs, as after a checkpoint, makes `nextval` take one."""
    for _ in range(10):
        taken: int = value(connection, "select nextval('outbox.event_id_seq')")
        if value(connection, "select pg_current_xact_id_if_assigned()") is None:
            return taken
        connection.rollback()
    raise AssertionError("each id came with an xid")


def test_id_taken_before_the_xid_would_be_lost(database: Database, store: Store) -> None:
    emit_and_commit(database)
    with database.connect() as connection:
        connection.execute("checkpoint")
        taken = id_without_xid(connection)
        follower = Follower(store, position=Position((store.tick()).tick))
        connection.execute(
            "insert into outbox.event (id, shard, uid, type, payload) values (%s, 0, outbox_internal.uuid7(), 't', '')",
            (taken,),
        )
    after = emit_and_commit(database)
    follower.follow()
    assert follower.ids == [after]


def test_xid_has_its_default_before_id_and_the_sequence_keeps_none_back(database: Database) -> None:
    with database.connect() as connection:
        columns = connection.execute(
            "select attname from pg_attribute where attrelid = 'outbox.event'::regclass and attnum > 0 order by attnum"
        ).fetchall()
        cache = value(connection, "select seqcache from pg_sequence where seqrelid = 'outbox.event_id_seq'::regclass")
    assert [name for (name,) in columns[:2]] == ["xid", "id"]
    assert cache == 1


WAYS_TO_EMIT = [
    "select outbox.emit('t', '{}')",
    "select outbox.emit('t', '{}', key => 'k', uid => gen_random_uuid())",
    "select outbox.emit_raw('t', 'p')",
    "select outbox.emit('t', k.payload) from unnest(array['{}', '[]']::jsonb[]) k (payload)",
]
STRICT = """
create function strict_id() returns bigint language plpgsql as $$
begin
    if pg_current_xact_id_if_assigned() is null then
        raise exception 'an id was asked for without an xid';
    end if;
    return nextval('outbox.event_id_seq');
end
$$;
alter table outbox.event alter column id set default strict_id()
"""
LENIENT = "alter table outbox.event alter column id set default nextval('outbox.event_id_seq'); drop function strict_id"


def test_every_way_to_emit_takes_its_xid_before_its_id(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(STRICT)
        try:
            with pytest.raises(psycopg.errors.RaiseException, match="without an xid"):
                connection.execute("select strict_id()")
            for statement in WAYS_TO_EMIT:
                connection.execute(statement.encode())
        finally:
            connection.execute(LENIENT)


@pytest.fixture(scope="module")
def roles(database: Database) -> Generator[Mapping[str, str]]:
    """Yield the kind of a grant → the name of the role."""
    names = {kind: f"{database.name}_{kind}" for kind in ("emit", "relay")}
    everyone = ", ".join(names.values())
    with database.connect(autocommit=True) as connection:
        for name in names.values():
            connection.execute(f"create role {name}".encode())
        migrate(database.dsn, grant_emit=[names["emit"]], grant_relay=[names["relay"]])
        yield names
        connection.execute(f"drop owned by {everyone}; drop role {everyone}".encode())


@pytest.mark.parametrize("kind", ["emit", "relay"])
@pytest.mark.parametrize(
    "statement",
    [
        "insert into outbox.event (id, uid, type, content_type) values (default, gen_random_uuid(), 't', 't')",
        "insert into outbox.event (xid, uid, type, content_type) values ('9', gen_random_uuid(), 't', 't')",
        "select nextval('outbox.event_id_seq')",
        "select setval('outbox.event_id_seq', 1)",
        "copy outbox.event (id, uid, type, content_type) from stdin",
    ],
)
def test_no_role_may_choose_ids_or_xids(
    database: Database, roles: Mapping[str, str], kind: str, statement: str
) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(f"set role {roles[kind]}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement.encode())


def test_older_tick_of_another_relay_brings_nothing_back(database: Database, store: Store) -> None:
    follower = Follower(store, position=Position(quiet(database)))
    ids = [emit_and_commit(database) for _ in range(3)]
    with newest(database) as (_, late, _hidden):
        older = (store.tick()).tick
    ids.append(late)
    ids += [emit_and_commit(database) for _ in range(3)]
    follower.follow()
    follower.read_to(older)
    follower.follow()
    ids.append(emit_and_commit(database))
    follower.follow()
    assert follower.ids == ids


# -- how a window is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("most_payload", [None, AMPLE_BYTES], ids=["version 1", "today"])
def test_latecomers_come_in_several_chunks_and_before_the_rest(
    database: Database, store: Store, most_payload: int | None
) -> None:
    follower = Follower(store, position=Position(quiet(database)), most_rows=4)
    follower.most_payload = most_payload
    with database.connect() as one, database.connect() as other:
        late = [emit(connection) for connection in (one, other) * 10]
        follower.follow()
        rest = [emit(one), *(emit_and_commit(database) for _ in range(5))]
    follower.follow()
    assert follower.ids == [*late, *rest]
    chunks = [(piece, ids) for piece, ids in follower.reads if set(ids) & set(late)]
    assert len(chunks) > len(late) // 4
    assert all(piece.late for piece, _ in chunks)
    assert max(len(ids) for _, ids in chunks) <= 4


def test_transaction_bigger_than_a_chunk_is_never_read_whole(database: Database, store: Store) -> None:
    follower = Follower(store, position=Position(quiet(database)), most_rows=7)
    with database.connect() as connection:
        late = [emit(connection) for _ in range(100)]
        follower.follow()
    emit_and_commit(database)
    follower.follow()
    assert follower.ids[:100] == late
    assert max(len(ids) for _, ids in follower.reads) <= 7


@pytest.mark.parametrize("transactions", [1, 3])
def test_few_latecomers_that_match_among_many_are_all_read(database: Database, store: Store, transactions: int) -> None:
    """A read that looked at enough says how far it got: without that, what lies behind is lost."""
    follower = Follower(store, position=Position(quiet(database)), types=["rare"], most_rows=3)
    with ExitStack() as stack:
        open_ones = [stack.enter_context(database.connect()) for _ in range(transactions)]
        late = [(n, emit(open_ones[n % transactions], "rare" if n % 70 == 69 else "usual")) for n in range(300)]
        follower.follow()
    follower.follow()
    assert follower.ids == [event for n, event in late if n % 70 == 69]


@pytest.mark.parametrize("bound", [{"most_rows": 1}, {"most_bytes": 1}], ids=["events", "bytes"])
def test_look_ends_with_the_latecomers_that_it_read(database: Database, store: Store, bound: dict[str, Any]) -> None:
    """The read of the latecomers is cut by a bound and also says how far it searched: the bound counts."""
    looking = Looking(store, position=Position(quiet(database)), **bound)
    with database.connect() as connection:
        late = [emit(connection) for _ in range(30)]
        looking.follow()
        rest = [emit_and_commit(database) for _ in range(3)]
    looking.follow()
    assert looking.ids == [*late, *rest]
    assert looking.windows >= 1


def test_look_leaves_large_payloads_to_the_usual_read(database: Database, store: Store) -> None:
    looking = Looking(store, position=Position(quiet(database)))
    looking.fault_at, looking.sizes = 10, (None,)
    ids = [emit_and_commit(database, payload=payload) for payload in (b"small", b"larger than that", b"small")]
    looking.follow()
    assert looking.ids == ids
    assert not any(event.fault for event in looking.got)
    assert looking.windows == 0


def test_look_reads_no_backlog(database: Database, store: Store) -> None:
    looking = Looking(store, position=Position(quiet(database)))
    request = WindowRequest(looking.position.a, 0, frozenset(range(SHARDS)), None, most_ids=5)
    for _ in range(5):
        emit_and_commit(database)
    assert store.look(request).window is not None
    emit_and_commit(database)
    assert store.look(request).window is None


def test_every_span_boundary_is_read_once(database: Database, store: Store) -> None:
    start = Position(quiet(database))
    ids: list[int] = []
    for n in range(30):
        ids.append(emit_and_commit(database))
        if n % 3 == 0:  # a hole in the ids
            with database.connect() as connection:
                emit(connection)
                connection.rollback()
    for span in range(1, 9):
        follower = Follower(store, position=start, most_span=span, most_rows=5, seed=span)
        follower.follow()
        assert follower.ids == ids


class Window:
    """A window whose events are all latecomers or all the rest, read with the function that fits."""

    def __init__(self, database: Database, store: Store, *, late: bool, most_payload: int | None) -> None:
        self._database = database
        self._store = store
        self._late = late
        self._most_payload = most_payload
        self._a = self._b = BEGINNING

    def fill(self, *emits: Mapping[str, Any]) -> list[int]:
        """Emit one event for each of ``emits`` in one transaction between two ticks, or around the first."""
        with self._database.connect() as connection:
            if not self._late:
                self._a = (self._store.tick()).tick
            ids = [emit(connection, **each) for each in emits]
            if self._late:
                self._a = (self._store.tick()).tick
        self._b = (self._store.tick()).tick
        return ids

    def read(
        self,
        *,
        shards: Sequence[int] = EVERY_SHARD,
        types: Sequence[str] | None = None,
        after: int = 0,
        upto: int = MAX_ID,
        rows: int = 1000,
        payload_bytes: int = AMPLE_BYTES,
    ) -> list[StoredEvent]:
        """Read the window once."""
        ask = self._store.read_late if self._late else self._store.read_rest
        most_payload = self._most_payload
        events = ask(shards, types, self._a, self._b, after, upto, rows, payload_bytes, most_payload=most_payload)
        pop_scan_end(events)
        return events

    def ids(self, **bounds: Any) -> list[int]:
        """Return the ids of one read."""
        return [event.id for event in self.read(**bounds)]


@pytest.fixture(params=["latecomers", "rest"])
def late(request: pytest.FixtureRequest) -> bool:
    return request.param == "latecomers"


@pytest.fixture(params=[None, AMPLE_BYTES], ids=["version 1", "today"])
def window(request: pytest.FixtureRequest, database: Database, store: Store, late: bool) -> Window:
    return Window(database, store, late=late, most_payload=request.param)


def test_read_returns_what_was_emitted(window: Window, database: Database) -> None:
    bare, full = window.fill({}, {"key": "k", "payload": bytes(range(256))})
    with database.connect() as connection:
        connection.execute(
            "update outbox.event set headers = '{\"h\": \"v\"}', deliver_at = '2030-01-01Z' where id = %s", (full,)
        )
        stored = connection.execute(
            "select id, shard, uid::text, type, key, payload, content_type, headers::text, deliver_at, created_at "
            "from outbox.event where id >= %s order by id",
            (bare,),
        ).fetchall()
    events = window.read()
    assert events == [(*row, None, None) for row in stored]
    assert [(event.key, event.headers is None, event.deliver_at is None) for event in events] == [
        (None, True, True),
        ("k", False, False),
    ]


def test_read_is_in_id_order_between_its_bounds(window: Window) -> None:
    ids = window.fill(*[PLAIN] * 9)
    assert window.ids() == ids
    assert window.ids(after=ids[2]) == ids[3:]
    assert window.ids(upto=ids[6]) == ids[:7]
    assert window.ids(after=ids[2], upto=ids[3]) == [ids[3]]
    assert window.ids(after=ids[8]) == []
    assert window.ids(rows=4) == ids[:4]
    assert window.ids(after=ids[3], rows=4) == ids[4:8]


def test_read_ends_with_the_event_that_reaches_the_byte_bound(window: Window) -> None:
    ids = window.fill(*[{"payload": bytes(MIB)}] * 4)
    for most, count in [(1, 1), (MIB, 1), (MIB + 1, 2), (2 * MIB, 2), (3 * MIB - 1, 3), (4 * MIB, 4), (9 * MIB, 4)]:
        assert window.ids(payload_bytes=most) == ids[:count], most


def test_events_without_payload_bytes_are_read(window: Window, database: Database) -> None:
    ids = window.fill({"payload": b""}, {"payload": b"x"}, {"payload": b""})
    assert window.ids(payload_bytes=1) == ids[:2]
    with database.connect() as connection:
        connection.execute("update outbox.event set payload = null where id = any(%s)", (ids[:2],))
    assert window.ids(payload_bytes=1) == ids


@pytest.mark.parametrize(
    ("pattern", "types"),
    [
        ("a_b", ["a_b"]),
        ("a%b", ["a%b"]),
        ("a\\b", ["a\\b"]),
        ("a*", ["a_b", "axb", "a%b", "a\\b"]),
        ("*.x", ["o.x"]),
        ("*", ["a_b", "axb", "a%b", "a\\b", "o.x", "B"]),
        ("b", []),
    ],
)
def test_types_are_filtered_as_routes_mean_them(window: Window, pattern: str, types: list[str]) -> None:
    window.fill(*({"kind": kind} for kind in ["a_b", "axb", "a%b", "a\\b", "o.x", "B"]))
    assert [event.type for event in window.read(types=[like_pattern(pattern)])] == types


def test_any_of_several_patterns_is_enough_and_none_at_all_means_none(window: Window) -> None:
    ids = window.fill({"kind": "a"}, {"kind": "b"}, {"kind": "c"})
    assert window.ids(types=["a", "c", "a%"]) == [ids[0], ids[2]]
    assert window.ids(types=[]) == []
    assert window.ids(types=None) == ids


def test_only_the_shards_that_were_asked_for_are_read(window: Window) -> None:
    ids = window.fill(*({"key": f"key-{n}"} for n in range(100)))
    every = window.read()
    assert [event.id for event in every] == ids
    assert len({event.shard for event in every}) > 20
    for shards in ([0], [0, 63], range(32), range(32, 64), []):
        expected = [event for event in every if event.shard in shards]
        assert window.read(shards=list(shards)) == expected


def test_events_of_a_key_share_a_shard_whatever_their_uid(window: Window) -> None:
    window.fill(*[{"key": "one"}] * 20, *[PLAIN] * 50)
    every = window.read()
    assert len({event.shard for event in every if event.key}) == 1
    assert len({event.shard for event in every if not event.key}) > 10
