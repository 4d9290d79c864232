"""Replays: what they deliver, in what order, and what they count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Verdict
from outbox_relay.postgres.migrations import rebase
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.erasing import erase
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.replays import Clients, act, counts, ended, preview, show, start
from tests.support.sink_actions import call, register
from tests.support.wait import until

KEYS = [f"k{n % 7}" for n in range(40)]
SHORT_LEASE = 3.0
PARKED = """insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
            select 's', e.id, e.shard, %s, false, now() + interval '1 hour', e.uid, e.type, 'application/json',
                  e.created_at
              from outbox.event e where e.id = %s"""
MARK = """insert into outbox.discarded (sink, id, uid, reason)
          select 's', e.id, case when %s then e.uid else gen_random_uuid() end, 'x'
            from outbox.event e where e.id = %s"""


def passed(database: Database, sink: str = "s") -> None:
    """Wait until the stored positions of a sink have passed every event."""
    has(database, "select from outbox_internal.backlog(%s, null, 1000, 5.0) where events = 0", sink)


def replayed(database: Database, sink: MemorySink, keys: Iterable[str | None], **options: Any) -> list[int]:
    """Emit events, and wait until the sink has passed them; return their ids."""
    wanted = emit(database, keys, **options)
    delivered(sink, wanted)
    passed(database)
    return wanted


@BOTH
def test_a_replay_delivers_the_events_again_in_the_order_of_their_keys(database: Database, keeps_order: bool) -> None:
    sink, clients = MemorySink(keeps_order=keeps_order), Clients(keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        wanted = replayed(database, sink, KEYS)
        number = start(database, since="PT1H")
        ended(database, number)
    assert sorted(clients.ids(number)) == wanted
    assert in_order(clients.delivered(number))
    assert ids(sink).count(wanted[0]) == 1
    assert counts(database, number) == (40, 40, 0, 0)
    assert query(database, "select from outbox.shard where sink like '~%%'") == []
    assert query(database, "select action, count from outbox.audit where action like 'replay%%' order by id") == [
        ("replay start", 1),
        ("replay end", 40),
    ]


def test_only_events_that_every_part_of_the_filter_matches_are_delivered(database: Database) -> None:
    sink, clients = MemorySink(), Clients()
    events = [("order.a", "k"), ("order.b", "k"), ("payment", "k"), ("order.a", "other"), ("order.a", None)]
    with database.connect() as connection:
        for kind, key in events:
            connection.execute("select outbox.emit_raw(%s, '1', key => %s)", (kind, key))
    routed = spec("s", patterns=("order.*", "other"))
    with running(database.dsn, (routed, sink), replay_client=clients):
        delivered(sink, [1, 2, 4, 5])
        passed(database)
        everything = start(database, since="PT1H")
        by_type = start(database, since="PT1H", type="*.a")
        by_key = start(database, key="k")
        both = start(database, key="k", type="order.b")
        none = start(database, key="k", type="nothing")
        for number in (everything, by_type, by_key, both, none):
            ended(database, number)
    assert [sorted(clients.ids(number)) for number in (everything, by_type, by_key, both, none)] == [
        [1, 2, 4, 5],
        [1, 4, 5],
        [1, 2],
        [2],
        [],
    ]


@pytest.mark.fence("a replay delivers an event before the sink does")
def test_events_that_the_sink_has_not_passed_are_not_the_replays(database: Database) -> None:
    """Goes red when the position of the target at the start is not looked at."""
    sink, clients = MemorySink(), Clients()
    with running(database.dsn, (spec("s"), sink), replay_client=clients) as harness:
        old = replayed(database, sink, KEYS)
        with database.connect() as open_transaction:
            late = open_transaction.execute("select outbox.emit_raw('t', '1', key => 'late') is not null").fetchone()
            assert late
            more = replayed(database, sink, KEYS)
            number = start(database, since="PT1H")
            open_transaction.commit()
        newer = emit(database, KEYS)
        delivered(sink, newer)
        ended(database, number)
        harness.settled()
    assert sorted(clients.ids(number)) == [*old, *more]
    assert len(ids(sink)) == len(set(ids(sink))) == 121


def test_an_event_with_a_row_or_a_mark_is_passed_by_and_counted(database: Database) -> None:
    """Goes red when rows and marks are not looked at."""
    sink, clients = MemorySink(), Clients()
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        wanted = replayed(database, sink, KEYS[:6])
        call(database, PARKED, "dead", wanted[0])
        call(database, PARKED, "waiting", wanted[1])
        call(database, MARK, True, wanted[2])
        call(database, MARK, False, wanted[3])
        number = start(database, since="PT1H")
        ended(database, number)
    assert sorted(clients.ids(number)) == wanted[3:]
    assert counts(database, number) == (6, 3, 0, 3)


def test_to_another_sink_goes_everything_that_matches(database: Database) -> None:
    first, second, clients = MemorySink(), MemorySink(), Clients()
    other = spec("t", patterns=("none",))
    with running(database.dsn, (spec("s"), first), (other, second), replay_client=clients):
        wanted = replayed(database, first, KEYS[:6])
        call(database, PARKED, "waiting", wanted[0])
        call(database, MARK, True, wanted[1])
        number = start(database, to="t", since="PT1H")
        later = emit(database, ["later"])
        ended(database, number)
        delivered(first, later)
    assert clients.ids(number) == wanted
    assert (show(database, number)["sink"], show(database, number)["target"]) == ("s", "t")
    assert second.delivered == []


@pytest.mark.slow
def test_dead_letters_become_those_of_the_sink_and_hold_no_key(database: Database) -> None:
    """Goes red when the row takes part in the order of its key: with when_dead = "hold" live events would wait."""

    def refuses(event: StoredEvent, _attempt: int) -> Verdict:
        return Refused("no", 400) if event.key == "k1" else DELIVERED

    sink, clients = MemorySink(keeps_order=False), Clients(lambda: refuses, keeps_order=False)
    with running(database.dsn, (spec("s", hold=True), sink), replay_client=clients):
        replayed(database, sink, KEYS[:14])
        number = start(database, since="PT1H")
        ended(database, number)
    successor = MemorySink(keeps_order=False)
    with running(database.dsn, (spec("s", hold=True), successor)):
        delivered(successor, emit(database, ["k1"]))
    assert counts(database, number) == (14, 12, 2, 0)
    assert query(database, "select sink, state, replay, key from outbox.delivery") == [("s", "dead", number, "k1")] * 2
    recorded = query(database, "select sink, outcome, detail ->> 'replay' from outbox.attempt")
    assert recorded == [("s", "refused", str(number))] * 2


@pytest.mark.fence("a relay that lost a shard of a replay settles, or counts what it delivered")
@pytest.mark.slow
def test_two_relays_share_a_replay_and_a_crash_of_one_loses_and_counts_nothing_twice(database: Database) -> None:
    """Goes red when positions of a replay are written without the fence, or the count without the position."""
    wanted = list[int]()

    arrived = list[StoredEvent]()

    async def slow(event: StoredEvent, _attempt: int) -> Verdict:
        await asyncio.sleep(0.05)
        arrived.append(event)
        return DELIVERED

    first, second = Clients(lambda: slow, keeps_order=False), Clients(lambda: slow, keeps_order=False)
    sinks = MemorySink(keeps_order=False), MemorySink(keeps_order=False)
    expects = {"lease_lost"}
    one = RelayHarness(
        database.dsn, [(spec("s"), sinks[0])], lease_seconds=SHORT_LEASE, replay_client=first, expects=expects
    )
    one.start()
    wanted += replayed(database, sinks[0], [f"k{n % 60}" for n in range(2000)])
    with running(database.dsn, (spec("s"), sinks[1]), lease_seconds=SHORT_LEASE, replay_client=second, expects=expects):
        has(database, "select from outbox.shard where sink = 's' having count(distinct owner) = 2")
        number = start(database, since="PT1H")
        has(database, "select from outbox.shard where sink = '~1' having count(distinct owner) = 2")

        def both() -> bool:
            return len(first.ids(number)) > 50 and len(second.ids(number)) > 50

        until(both, seconds=20, what="both relays deliver events of the replay")
        one.crash()
        ended(database, number, seconds=60)
    assert set(first.ids(number)) | set(second.ids(number)) == set(wanted)
    assert in_order(arrived)
    assert counts(database, number) == (2000, 2000, 0, 0)


def test_pause_resume_and_cancel(database: Database) -> None:
    async def slow(_event: StoredEvent, _attempt: int) -> Verdict:
        await asyncio.sleep(0.01)
        return DELIVERED

    sink, clients = MemorySink(), Clients(lambda: slow, keeps_order=False)
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        wanted = replayed(database, sink, [f"k{n % 7}" for n in range(2000)])
        number = start(database, since="PT1H")

        def some() -> bool:
            return len(clients.ids(number)) > 20

        until(some, seconds=20, what="events are delivered")
        assert act(database, "pause", number)
        assert not act(database, "pause", number)
        has(database, "select from outbox.shard where sink = '~1' and owner is not null having count(*) = 0")
        before = len(clients.ids(number))
        assert before < len(wanted)
        assert act(database, "resume", number)

        def more() -> bool:
            return len(clients.ids(number)) > before + 20

        until(more, seconds=20, what="more events are delivered")
        assert act(database, "cancel", number)
        found = ended(database, number, "cancelled")
    assert in_order(clients.delivered(number))
    assert found["delivered"] == len(set(clients.ids(number))) < len(wanted)
    assert query(database, "select from outbox.delivery") == []


def test_a_rate_bounds_the_events_of_all_relays_together(database: Database) -> None:
    """Goes red when each relay has the rate for itself."""
    clients = Clients(keeps_order=False)
    sinks = MemorySink(keeps_order=False), MemorySink(keeps_order=False)
    with (
        running(database.dsn, (spec("s"), sinks[0]), lease_seconds=SHORT_LEASE, replay_client=clients),
        running(database.dsn, (spec("s"), sinks[1]), lease_seconds=SHORT_LEASE, replay_client=clients),
    ):
        has(database, "select from outbox.shard where sink = 's' having count(distinct owner) = 2")
        wanted = emit(database, [f"k{n % 60}" for n in range(200)])
        passed(database)
        number = start(database, since="PT1H", rate=20)
        [(began,)] = query(database, "select extract(epoch from clock_timestamp())::float8")
        has(database, "select from outbox.shard where sink = '~1' having count(distinct owner) = 2")

        def some() -> bool:
            return len(clients.ids(number)) >= 60

        until(some, seconds=30, what="60 events are delivered")
        [(now,)] = query(database, "select extract(epoch from clock_timestamp())::float8")
        assert len(clients.ids(number)) <= 20 * (now - began + 2)
        act(database, "cancel", number)
    assert len(clients.ids(number)) < len(wanted)


@pytest.mark.fence("transaction numbers of another cluster are compared with those of a replay's start")
def test_a_rebase_in_between_loses_nothing_of_a_replay(database: Database) -> None:
    """Goes red when the snapshots of the start are compared with numbers of another cluster."""
    sink, clients = MemorySink(), Clients()
    with running(database.dsn, (spec("s"), sink)):
        wanted = replayed(database, sink, KEYS)
    call(database, "delete from outbox.relay")
    number = start(database, since="PT1H")
    call(database, "update outbox.event set xid = (xid::text::bigint + 1000000)::text::xid8")
    rebase(database.dsn)
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        ended(database, number)
    assert clients.ids(number) == wanted


def test_a_preview_counts_and_says_what_is_not_there(database: Database) -> None:
    register(database, "s")
    emit(database, KEYS)
    assert preview(database, since="PT1H")["matched"] == 0, "the sink has passed nothing"
    register(database, "t", start="now")
    found = preview(database, to="t", since="PT1H")
    assert (found["matched"], found["exact"], found["relays"]) == (40, True, 0)
    unknown = "00000000-0000-0000-0000-000000000001"
    assert preview(database, uids=[unknown])["unknown"] == [unknown]


@pytest.mark.slow
def test_an_event_of_a_replay_is_erased_once_that_has_ended(database: Database) -> None:
    """Goes red when an erasure looks at sinks and rows only."""
    sink, clients = MemorySink(), Clients()
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        replayed(database, sink, ["anna", "b"])
    number = start(database, key="anna")
    refused = erase(database, "--key", "anna")
    assert refused.code == 1
    assert f"is pending in replay {number}" in refused.err
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        ended(database, number)
        has(database, "select from outbox.replay where cleared")
    assert (erase(database, "--key", "anna")).code == 0
    assert query(database, "select key = outbox_internal.keyed_hash('anna') from outbox.replay") == [(True,)]
