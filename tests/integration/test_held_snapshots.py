"""Statements that relays repeat, while another session holds a snapshot and VACUUM removes no dead version."""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.database import statements
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.lock_waits import waiting
from tests.support.wait import until

SINK = "s"
RENEWALS = """
do $$ begin
    for n in 1 .. 5760 loop
        perform outbox_internal.renew_sessions(s.owner, array[s.sink], 15) from outbox.session s;
        commit;
    end loop;
end $$"""
"""Those of 8 hours, one every 5 seconds."""
ANY_SIZE = "select outbox_internal.raise_ledger_starts(1, 0)"
START = "select ledger_start from outbox.sink where name = 's'"
STANDING = "select * from outbox.standing order by sink, shard"
POSITION = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select sink, shards, epochs, a_seq, a_snapshot, a_next, last_id from outbox.progress order by seq desc limit 1
returning seq"""
ENTRIES = "select {}".format(
    ", ".join(f"pg_stat_get_xact_tuples_returned('outbox.{index}'::regclass)" for index in ("progress_pkey",))
)
"""The entries that this transaction has read of these indexes, those of dead versions too."""


@contextmanager
def held_snapshot(database: Database) -> Generator[None]:
    """Hold a snapshot, from before everything that happens in the block."""
    with database.connect() as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select pg_current_xact_id()")
        yield


@pytest.fixture
def owner(database: Database) -> Generator[Ledger]:
    """Yield a relay that owns all shards of a sink, for a minute."""
    with ledger(database) as books:
        books.register((SINK, ["*"], "now"))
        books.own(SINK)
        yield books


def advance(books: Ledger, positions: int) -> None:
    """Write positions of all shards, and trim the ledger."""
    for _ in range(positions):
        books.catch_up(SINK)
    while books.store.value("trim_progress", {"most": 1000}):
        pass


# -- positions ------------------------------------------------------------------------------------------------------


def test_readers_of_the_ledger_begin_behind_what_was_trimmed(owner: Ledger) -> None:
    """The entries of an index count the work, also for dead versions."""
    with held_snapshot(owner.database):
        advance(owner, 300)
        before = owner.query(STANDING)
        assert owner.query(ANY_SIZE) == [(False,)]
        assert owner.query(START) == owner.query("select min(seq) from outbox.progress")
        assert owner.query(STANDING) == before
        advance(owner, 2)
        for name, parameters in {
            "positions": {"sink": SINK, "shards": list(range(SHARDS)), "server": None},
            "trim_progress": {"most": 1000},
            "missing_positions": {},
            "figures_of_sinks": {},
            "floor": {},
            "trim_routes": {},
            "trim_former_positions": {"most": 1000},
        }.items():
            with owner.database.connect() as connection:
                connection.execute(statements()[name], parameters)
                [(entries,)] = connection.execute(ENTRIES.encode()).fetchall()
            assert entries < 30, name
        assert len(owner.store.positions(SINK, range(SHARDS))) == SHARDS
    before = owner.query(START)
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) > before


@pytest.mark.fence("the ledger of a sink starts behind a position that is committed later")
def test_a_ledger_does_not_start_behind_a_position_that_is_not_committed(owner: Ledger) -> None:
    """Goes red without the lock: no reader would find the position that was begun first."""
    with owner.database.connect() as slow:
        [(begun,)] = slow.execute(POSITION.encode()).fetchall()
        advance(owner, 3)
        assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query(START) == [(0,)]
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) == [(begun,)]


def test_the_start_of_a_ledger_waits_for_no_more_than_a_moment(owner: Ledger) -> None:
    """It is raised beside a reader, and another time if another session has locked the sink or the ledger."""
    advance(owner, 3)
    with owner.database.connect() as other:
        other.execute("select from outbox.sink where name = 's' for update")
        assert owner.query(ANY_SIZE) == [(True,)]
    with owner.database.connect() as other:
        other.execute("lock table outbox.progress in share update exclusive mode")  # as VACUUM does
        assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query(START) == [(0,)]
    with owner.database.connect() as other:
        other.execute("lock table outbox.progress in access share mode")
        assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) == owner.query("select min(seq) from outbox.progress")


@pytest.mark.fence("the ledger of a sink starts behind a position that is committed later")
def test_a_rebase_writes_positions_behind_every_start(owner: Ledger) -> None:
    """Goes red when it goes by the positions that are left: after a partial restore, or TRUNCATE, none would count."""
    advance(owner, 3)
    owner.query(ANY_SIZE)
    owner.do("truncate outbox.progress restart identity")
    owner.query("select outbox.rebase()")
    assert owner.query("select count(*) from outbox.standing") == [(SHARDS,)]


# -- leases ---------------------------------------------------------------------------------------------------------


def test_a_renewal_writes_one_row_and_stays_fast_while_old_versions_are_kept(owner: Ledger) -> None:
    """Its index has few entries: most versions are in the page of the one before."""
    written = "select pg_stat_get_xact_tuples_updated('outbox.{}'::regclass)"
    written = f"{written.format('session')} union all {written.format('shard')}"
    parameters = {"owner": owner.relay, "sinks": [SINK], "lease": 15.0}
    renewal = statements()["renew_sessions"]
    with held_snapshot(owner.database), owner.database.connect(autocommit=True) as connection:
        connection.execute(RENEWALS.encode())
        with owner.database.connect() as counted:
            assert len(counted.execute(renewal, parameters).fetchall()) == SHARDS
            assert counted.execute(written.encode()).fetchall() == [(1,), (0,)]
        taken = list[float]()
        for _ in range(20):
            began = time.perf_counter()
            connection.execute(renewal, parameters)
            taken.append(time.perf_counter() - began)
    assert min(taken) < 0.005, "seconds"


@pytest.mark.fence("a relay that was not renewed in time loses its shards to others")
def test_a_session_that_ended_long_ago_is_renewed_and_keeps_the_shards_that_no_other_relay_has(owner: Ledger) -> None:
    """One that is not there, as after a restore, begins without a shard."""
    owner.do("update outbox.session set lease_until = now() - interval '1 day'")
    assert owner.store.renew_sessions(owner.relay, [SINK], 60.0) == {SINK: owner.epochs[SINK]}
    owner.do("update outbox.session set lease_until = now() - interval '1 day'")
    assert len(Ledger(owner.database, owner.store).own(SINK, 10)) == 10
    assert owner.store.renew_sessions(owner.relay, [SINK], 60.0)[SINK].keys() == set(range(10, SHARDS))
    assert Ledger(owner.database, owner.store).own(SINK) == [], "it is the owner of the others again"
    owner.do("delete from outbox.session")
    assert owner.store.renew_sessions(owner.relay, [SINK], 60.0) == {SINK: {}}


@pytest.mark.fence("a relay claims shards whose owner renews its lease")
@pytest.mark.parametrize("first", ["renewal", "claim"])
def test_a_renewal_and_a_claim_of_its_shards_exclude_each_other(owner: Ledger, first: str) -> None:
    """Goes red when a claim does not lock the session, or a renewal reads its shards before it has it."""
    owner.do("update outbox.session set lease_until = now() - interval '1 second'")
    other = Ledger(owner.database, owner.store)
    other.store.renew_sessions(other.relay, [SINK], 60.0)
    claim: dict[str, Any] = {
        "sink": SINK, "owner": other.relay, "generation": owner.generations[SINK], "most": SHARDS,
        "known": [], "patterns": None, "claim": None,
    }  # fmt: skip
    renewal = {"owner": owner.relay, "sinks": [SINK], "lease": 60.0}
    with owner.database.connect() as one, ThreadPoolExecutor(1) as pool:
        if first == "renewal":
            assert len(one.execute(statements()["renew_sessions"], renewal).fetchall()) == SHARDS
            assert other.own(SINK) == []
            one.commit()
            assert other.own(SINK) == []
        else:
            assert one.execute(statements()["claim_shards"], claim).rowcount == SHARDS
            renewed = pool.submit(owner.store.renew_sessions, owner.relay, [SINK], 60.0)
            until(lambda: waiting(owner.database, "true"), seconds=20, what="the renewal waits")
            one.commit()
            assert renewed.result(20) == {SINK: {}}
