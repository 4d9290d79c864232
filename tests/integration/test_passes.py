"""Passes: what a sink has read, under which patterns, and what ``why`` makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_relay import admin
from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.routing import canonical, matches
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.database import statements
from tests.support.database import Database, query
from tests.support.deliveries import delivered
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.sink_actions import call, register, remove, rename, seek
from tests.support.wait import until

ANY_ROUTES = {"patterns": None, "claim": None}
AN_HOUR = "update outbox.sink_pass set begun_at = begun_at - interval '61 minutes'"
LAPSE = "update outbox.shard set lease_until = now() - interval '1 second'"
PASSES = "select kind, generation, ended_at is not null from outbox.sink_pass where shard = %s order by seq"
READ = """
select pg_stat_get_xact_tuples_returned(c.oid), pg_stat_get_xact_tuples_returned(i.indexrelid)
  from pg_class c join pg_index i on i.indrelid = c.oid where c.oid = 'outbox.sink_pass'::regclass"""
"""Rows that the transaction has read of passes: by scans of the table, and by the index."""
READ_OF_LOG = """
select (select count(*) from outbox.row_ahead),
       (select sum(pg_stat_get_xact_tuples_returned(inhrelid)) from pg_inherits
         where inhparent = 'outbox.event'::regclass)"""
"""Rows that are remembered, and rows of the log that the transaction has read by scans of its tables."""
PARK_ALL = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
select 's', e.id, e.shard, 'waiting', false, now(), e.uid, e.type, e.content_type, e.created_at from outbox.event e"""
ADVANCE = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select s.sink, array_agg(s.shard), array_agg(s.epoch), n, '100:100:', 100, n
  from outbox.shard s cross join generate_series(1, 50) n group by s.sink, n order by n"""
"""Fifty positions of every shard, at the epochs of the owner."""
VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=8)
FEW = st.text(st.sampled_from("ab*%_\\"), min_size=1, max_size=6)


@pytest.fixture
async def books(database: Database) -> AsyncGenerator[Ledger]:
    """Yield a database with the sink `s` for orders, owned by the relay `here`."""
    async with ledger(database) as found:
        await found.register(("s", ["order.*"], "beginning"))
        await found.live("here", "s")
        await found.own("s")
        yield found


async def why(books: Ledger, event_id: int, sink: str = "s") -> dict[str, Any]:
    """Return what is told of an event and a sink."""
    return (await admin.why(books.store, UUID(books.uid(event_id))))["sinks"][sink]


async def states(books: Ledger, *event_ids: int, sink: str = "s") -> list[str]:
    """Return the states of events."""
    return [(await why(books, event_id, sink))["state"] for event_id in event_ids]


async def to_the_end(books: Ledger, sink: str = "s") -> None:
    """Write positions after everything that is committed now."""
    await books.catch_up(sink)


async def change_routes(books: Ledger, *patterns: str) -> None:
    """Register other patterns, which nothing has claimed yet."""
    await books.register(("s", list(patterns), "beginning"))


async def take_over(books: Ledger) -> Ledger:
    """Let the leases of every owner end, and claim the shards for another relay."""
    books.do(LAPSE)
    other = Ledger(books.database, books.store)
    await other.own("s")
    return other


def shard(books: Ledger, event_id: int) -> int:
    """Return the shard of an event."""
    return books.query("select shard from outbox.event where id = %s", event_id)[0][0]


# -- routes -------------------------------------------------------------------------------------------------


async def test_relays_with_other_routes_record_passes_of_their_own(database: Database) -> None:
    async with ledger(database) as books:
        [order, user] = [*books.emit("a", type="order.paid"), *books.emit("a", type="user.created")]
        await serve(database, spec("s", patterns=("order.*",), types=["order.%"]), order)
        [later] = books.emit("a", type="user.created")
        await serve(database, spec("s"), later)
        assert await states(books, order, user, later) == ["settled", "not routed", "settled"]


async def serve(database: Database, sink_spec: SinkSpec, event_id: int) -> None:
    """Run a relay until it has delivered an event and settled everything, then stop it."""
    sink = MemorySink()
    async with running(database.dsn, (sink_spec, sink)) as harness:
        await delivered(sink, [event_id])
        await harness.settled()
        await harness.stop()


async def test_events_are_judged_by_the_patterns_of_the_pass_that_read_them(books: Ledger) -> None:
    first = books.emit("a", "a", type="order.paid") + books.emit("a", type="user.created")
    await to_the_end(books)
    await change_routes(books, "user.*")
    assert await states(books, *first) == ["settled", "settled", "not routed"]
    second = books.emit("a", type="order.paid") + books.emit("a", type="user.created")
    other = await take_over(books)
    await to_the_end(other)
    assert await states(books, *first, *second) == ["settled", "settled", "not routed", "not routed", "settled"]


async def test_an_older_generation_that_drains_still_delivers_what_it_has_read(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    await change_routes(books, "user.*")
    assert await states(books, event_id) == ["pending"]
    books.do(LAPSE)
    assert await states(books, event_id) == ["not routed"]


async def test_a_claim_counts_for_the_generation_that_its_statement_saw(books: Ledger) -> None:
    """Goes red when the trigger reads the generation with a snapshot of its own."""
    [event_id] = books.emit("a", type="order.paid")
    books.do(LAPSE)
    books.do("create function public.stop() returns trigger language plpgsql as "
             "'begin perform pg_advisory_xact_lock_shared(77); return new; end'")  # fmt: skip
    books.do("create trigger a_stop before update on outbox.shard for each row execute function public.stop()")
    books.do("delete from outbox.sink_pass")
    claim = {"sink": "s", "owner": uuid4(), "generation": books.generations["s"], "lease": 60.0, "most": 64}
    with books.database.connect(autocommit=True) as gate, books.database.connect(autocommit=True) as relay:
        gate.execute("select pg_advisory_lock(77)")
        text = statements()["claim_shards"]
        claimed = threading.Thread(
            target=relay.execute, args=(text, {**claim, **ANY_ROUTES, "free_for": 0.0, "lapsed_for": 0.0})
        )
        claimed.start()
        waits = "select from pg_locks where locktype = 'advisory' and not granted"
        until(lambda: books.query(waits), seconds=20, what="the claim waits")
        await change_routes(books, "user.*")
        gate.execute("select pg_advisory_unlock(77)")
        claimed.join(20)
    [(_, generation, _ended)] = books.query(PASSES, shard(books, event_id))
    assert generation == claim["generation"] != books.generations["s"]


async def test_what_an_earlier_owner_writes_late_does_not_move_the_beginning_of_a_pass(books: Ledger) -> None:
    """Goes red when a claim does not write the position at its own epoch."""
    order, user = (*books.emit("a", type="order.paid"), *books.emit("a", type="user.created"))
    await change_routes(books, "user.*")
    await take_over(books)
    await to_the_end(books)
    [position] = (await books.store.positions("s", [shard(books, user)])).values()
    assert position.a.seq < order
    assert await states(books, order, user) == ["settled", "pending"]


async def test_a_rename_while_an_older_generation_drains_loses_no_pass(books: Ledger) -> None:
    [order] = books.emit("a", type="order.paid")
    await to_the_end(books)
    await change_routes(books, "user.*")
    [user] = books.emit("a", type="user.created")
    rename(books.database, "s", "t")
    books.do(LAPSE)
    other = Ledger(books.database, books.store)
    await other.own("t")
    await to_the_end(other, "t")
    assert await states(books, order, user, sink="t") == ["settled", "settled"]
    assert [row[:2] for row in books.query(PASSES, shard(books, user))] == [
        ("start", 2), ("claim", books.generations["s"]),
    ]  # fmt: skip


# -- seeks --------------------------------------------------------------------------------------------------


async def test_a_seek_passes_over_what_was_not_read_and_says_so(books: Ledger) -> None:
    [read] = books.emit("a", type="order.paid")
    await to_the_end(books)
    [skipped] = books.emit("a", type="order.paid")
    seek(books.database, "s", "now")
    found = await why(books, skipped)
    assert (await states(books, read), found["state"], found["by"]) == (["settled"], "passed over", "seek")
    text = admin.why_text(await admin.why(books.store, UUID(books.uid(skipped))))
    assert "skipped by sinks seek, at " in text
    seek(books.database, "s", "beginning")
    found = await why(books, read)
    assert (found["state"], found["again"], await states(books, skipped)) == ("pending", True, ["pending"])


@pytest.mark.parametrize("trimmed", [False, True])
async def test_what_an_owner_settles_before_it_notices_a_seek_is_settled(books: Ledger, trimmed: bool) -> None:
    """Goes red when a position that was written late is forgotten, or trimmed without a trace."""
    [settled, skipped] = (*books.emit("a", type="order.paid"), *books.emit("a", type="order.paid"))
    tick = await books.tick()
    seek(books.database, "s", "now")
    await books.place("s", Position(BEGINNING, tick, settled))
    if trimmed:
        await books.store.trim_progress(1000)
    assert await states(books, settled, skipped) == ["settled", "passed over"]


async def test_of_late_positions_the_last_one_of_each_epoch_is_kept(books: Ledger) -> None:
    """Goes red when each late position has a row of its own, or when the first one trimmed stays."""
    events = books.emit(*"aaa", type="order.paid")
    tick = await books.tick()
    seek(books.database, "s", "now")
    for event_id in events[:2]:
        await books.place("s", Position(BEGINNING, tick, event_id))
        await books.store.trim_progress(1000)
    assert books.query("select count(*) from outbox.late_position") == [(64,)]
    assert await states(books, *events) == ["settled", "settled", "passed over"]


def test_a_trim_looks_for_passes_only_of_positions_at_older_epochs(database: Database) -> None:
    """Goes red when the passes of a shard are read for each position that is trimmed."""
    generation = register(database, "s")
    for _ in range(2):
        call(database, LAPSE)
        claim(database, generation)
    with database.connect() as connection:
        connection.execute("set local track_functions = 'all'")
        connection.execute(ADVANCE)
        assert connection.execute(statements()["trim_progress"], {"most": 1000}).fetchall() == [(50,)]
        called = "select pg_stat_get_xact_function_calls('outbox_internal.pass_spans'::regproc)"
        assert connection.execute(called).fetchall() == [(None,)]


def claim(database: Database, generation: int) -> None:
    """Claim every shard of the sink `s` for a new relay."""
    with database.connect(autocommit=True) as connection:
        claim_on(connection, generation)


def claim_on(connection: Any, generation: int) -> None:
    """Claim every shard of the sink `s` for a new relay, in the transaction of a connection."""
    values = {"sink": "s", "owner": uuid4(), "generation": generation, "lease": 60.0, "most": 64}
    connection.execute(statements()["claim_shards"], {**values, **ANY_ROUTES, "free_for": 0.0, "lapsed_for": 0.0})


def test_a_claim_looks_each_row_ahead_up_and_reads_no_log(database: Database) -> None:
    """Goes red when rows are joined to a log that the planner thinks is small enough to be read."""
    register(database, "s", "order.*")
    call(database, "select outbox.emit('order.paid', '1') from generate_series(1, 3000)")
    call(database, PARK_ALL)
    call(database, "analyze outbox.event, outbox.delivery")
    generation = register(database, "s", "user.*")
    with database.connect() as connection:
        claim_on(connection, generation)
        [(ahead, read)] = connection.execute(READ_OF_LOG).fetchall()
    assert (ahead, read) == (3000, 0)


async def test_a_row_that_lay_behind_the_end_of_a_pass_was_routed(books: Ledger) -> None:
    """Goes red when rows behind the place of a seek are not kept in mind."""
    first, parked, skipped = books.emit("a", "a", "a", type="order.paid")
    await books.park("s", books.row(parked, ordered=False))
    seek(books.database, "s", "now")
    books.do("delete from outbox.delivery")
    assert await states(books, first, parked, skipped) == ["passed over", "settled", "passed over"]


# -- rows, marks, attempts -------------------------------------------------------------------------------------


async def test_rows_that_an_unfinished_removal_took_are_discarded(books: Ledger) -> None:
    ids = books.emit("a", "a", "a", type="order.paid")
    await books.park("s", *(books.row(event_id, "dead") for event_id in ids))
    await to_the_end(books)
    assert not remove(books.database, "s", most=2)["removed"]
    assert sorted(await states(books, *ids)) == ["dead", "discarded", "discarded"]


async def record(books: Ledger, event_id: int, sink: str = "s") -> None:
    """Record a delivery of an event."""
    detail = {"partition": 2, "offset": 7}
    delivery = AttemptRecord(event_id, books.uid(event_id), 3, "delivered", time.monotonic(), 0.02, 204, None, detail)
    await books.store.settle(sink, books.relay, {}, [], {}, records=[delivery], relay="here")


async def test_a_recorded_delivery_is_shown_whatever_became_of_its_sink_s_place(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    await record(books, event_id)
    seek(books.database, "s", "now")
    found = await why(books, event_id)
    assert datetime_of(found.pop("at"))
    assert {name: found[name] for name in ("state", "attempt", "relay", "status", "partition", "offset")} == {
        "state": "delivered", "attempt": 3, "relay": "here", "status": 204, "partition": 2, "offset": 7,
    }  # fmt: skip
    text = admin.why_text(await admin.why(books.store, UUID(books.uid(event_id))))
    assert "by relay here, attempt 3, status 204" in text
    assert "partition 2, offset 7" in text
    rename(books.database, "s", "t")
    rename(books.database, "t", "s")
    assert await states(books, event_id) == ["delivered"]


def datetime_of(text: str) -> bool:
    """Return True if a text is a time with its zone."""
    return text.endswith("+00:00")


async def test_a_sink_is_lent_no_delivery_of_another_one_that_had_its_name(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    await record(books, event_id)
    remove(books.database, "s", forget=True)
    register(books.database, "s", "user.*")
    assert await states(books, event_id) == ["not routed"]


async def test_an_event_past_retention_is_told_by_its_marks_and_records(books: Ledger) -> None:
    delivered, discarded = books.emit("a", "a", type="order.paid")
    await books.register(("t", ["*"], "beginning"))
    await record(books, delivered)
    await books.park("s", books.row(discarded, "dead"))
    await to_the_end(books)
    call(books.database, "select outbox.discard_deliveries('{}', reason => 'no use', actor => 'me')")
    uids = [UUID(books.uid(event_id)) for event_id in (delivered, discarded)]
    books.do("truncate outbox.event")
    found = [await admin.why(books.store, uid) for uid in uids]
    assert [each["sinks"]["s"]["state"] for each in found] == ["delivered", "discarded"]
    assert [each["sinks"]["t"]["reason"] for each in found] == ["past retention", "past retention"]
    assert (found[0]["in_log"], found[0]["type"], found[0]["id"]) == (False, None, delivered)
    assert "by me: no use" in admin.why_text(found[1])
    assert "no longer in the log" in admin.why_text(found[0])


async def test_an_erased_event_is_erased_in_every_sink(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    books.do("update outbox.event set content_type = 'application/x-erased', payload = ''")
    assert await why(books, event_id) == {"state": "erased", "attempts_recorded": []}


# -- what is not known ----------------------------------------------------------------------------------------


async def test_before_the_first_pass_of_an_older_database_nothing_is_claimed(books: Ledger) -> None:
    [before] = books.emit("a", type="order.paid")
    await to_the_end(books)
    books.do("delete from outbox.sink_pass")
    found = await why(books, before)
    assert (found["state"], found["reason"]) == ("unknown", "before passes were recorded")
    [after] = books.emit("a", type="order.paid")
    await to_the_end(await take_over(books))
    assert await states(books, before, after) == ["unknown", "settled"]


async def test_after_a_restore_nothing_is_claimed_before_the_rebase(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    await to_the_end(books)
    books.do("update outbox.meta set system_identifier = 7")
    found = await why(books, event_id)
    assert (found["state"], found["reason"]) == ("unknown", "rebase needed")


async def test_rows_beyond_count_make_the_events_behind_them_unknown(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    seek(books.database, "s", "now")
    books.do("update outbox.sink_pass set more_rows = true where ended_at is not null")
    found = await why(books, event_id)
    assert (found["state"], found["reason"]) == ("unknown", "too many rows")


# -- trim, plans, patterns ------------------------------------------------------------------------------------


async def test_passes_that_no_kept_event_needs_are_trimmed(books: Ledger) -> None:
    [old] = books.emit("a", type="order.paid")
    for pattern in ("user.*", "order.*", "*"):
        await to_the_end(books)
        await change_routes(books, pattern)
        books = await take_over(books)
    [kept] = books.emit("a", type="order.paid")
    await to_the_end(books)
    assert await books.store.trim_passes() == 0
    assert len(books.query(PASSES, 0)) == 4
    books.do("delete from outbox.event where id = %s", old)
    assert await books.store.trim_passes() == 0  # an owner that was suspended may yet settle
    books.do(AN_HOUR)
    assert await books.store.trim_passes() == 3 * 64
    assert len(books.query(PASSES, 0)) == 1
    assert await states(books, kept) == ["settled"]
    assert books.query("select count(*) from outbox.sink_patterns") == [(1,)]


@pytest.mark.parametrize("trimmed", [False, True])
async def test_a_pass_stays_with_the_positions_that_its_owners_wrote_after_it(books: Ledger, trimmed: bool) -> None:
    """Goes red when a pass is trimmed by its end alone, which an owner that has not noticed a seek goes beyond."""
    seek(books.database, "s", "beginning")
    [settled] = books.emit("a", type="order.paid")
    await to_the_end(books)
    if trimmed:
        await books.store.trim_progress(1000)
    books.do(AN_HOUR)
    assert await books.store.trim_passes() == 0
    await books.store.trim_progress(1000)
    found = await why(books, settled)
    assert (found["state"], found["again"]) == ("pending", True)
    books.emit("a", type="order.paid")
    books.do("delete from outbox.event where id = %s", settled)
    assert await books.store.trim_passes() == 64
    assert books.query("select count(*) from outbox.late_position") == [(0,)]


async def test_a_position_that_was_written_late_holds_no_pass_of_an_empty_log(books: Ledger) -> None:
    seek(books.database, "s", "beginning")
    books.emit("a", type="order.paid")
    await to_the_end(books)
    await books.store.trim_progress(1000)
    books.do(AN_HOUR)
    books.do("truncate outbox.event")
    assert await books.store.trim_passes() == 64


async def test_passes_of_a_clock_that_was_ahead_are_trimmed(books: Ledger) -> None:
    seek(books.database, "s", "beginning")
    books.do("update outbox.sink_pass set begun_at = begun_at + interval '1 year'")
    assert await books.store.trim_passes() == 64


async def test_a_rename_keeps_what_was_settled_before_a_seek_was_noticed(books: Ledger) -> None:
    """Goes red when a rename leaves the positions behind that the ledger has and that do not count any more."""
    [settled] = books.emit("a", type="order.paid")
    tick = await books.tick()
    seek(books.database, "s", "now")
    await books.place("s", Position(BEGINNING, tick, settled))
    rename(books.database, "s", "t")
    assert await states(books, settled, sink="t") == ["settled"]


async def test_a_thousand_passes_are_read_by_their_index_alone(books: Ledger) -> None:
    [event_id] = books.emit("a", type="order.paid")
    await to_the_end(books)
    books.do(
        "insert into outbox.sink_pass (sink, shard, generation, epoch, kind, begun_seq, a_seq, a_snapshot, a_next, "
        "last_id) select p.sink, p.shard, p.generation, p.epoch, 'claim', p.begun_seq, p.a_seq, p.a_snapshot, "
        "p.a_next, p.last_id from outbox.sink_pass p cross join generate_series(1, 1000) order by p.shard"
    )
    uid = books.uid(event_id)
    with books.database.connect() as connection:
        connection.execute("select outbox.why(%s)", (uid,))
        [(scanned, read)] = connection.execute(READ).fetchall()
    assert scanned == 0
    assert 1000 <= read <= 2 * (1000 + 2)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(VISIBLE, FEW), max_size=4), st.one_of(VISIBLE, FEW).map(lambda text: text.replace("*", "x")))
def test_patterns_match_in_the_schema_as_they_do_in_the_relay(
    matcher: Any, patterns: list[str], event_type: str
) -> None:
    patterns = [canonical(pattern) for pattern in patterns]
    [(found,)] = matcher.execute(
        "select outbox_internal.type_matches(%s::text[], %s)", (patterns, event_type)
    ).fetchall()
    assert found == any(matches(pattern, event_type) for pattern in patterns)


@pytest.fixture
def matcher(database: Database) -> Any:
    """Yield a connection."""
    with database.connect(autocommit=True) as connection:
        yield connection


def test_claims_of_one_generation_begin_one_pass(database: Database) -> None:
    generation = register(database, "s")
    for _ in range(3):
        call(database, LAPSE)
        claim(database, generation)
    assert query(database, "select kind, count(*) from outbox.sink_pass group by kind") == [("start", 64)]
