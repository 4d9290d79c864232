"""Figures of the database: their values, the relay that measures them, and groups that fail."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb

from outbox_relay.postgres.migrations import migrate
from outbox_relay.service import figures as module
from outbox_relay.service.figures import FIGURES, KEPT_SECONDS, LEASE_SECONDS, Entry, Figures
from tests.docs.pages import text
from tests.support.database import Database, query
from tests.support.logs import RecordedLog
from tests.support.relay_harness import CountingStore
from tests.support.roles import new_role

REGISTER = """
select outbox_internal.register_sinks(
         '[{"name": "crm", "patterns": ["a.*"]}, {"name": "idle", "patterns": ["b.*"], "start": "now"}]',
         0, '3:3:', 3)"""
ROWS = """
insert into outbox.delivery
       (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type, created_at, deliver_at)
select 'crm', 1000000 + n, 0, s.state, false, now(), gen_random_uuid(), 'a.b', '1', 'text/plain',
       now() - n * interval '1 minute', s.deliver_at
  from (values (1, 'waiting', null), (2, 'waiting', now() + interval '1 day'), (3, 'held', null), (4, 'dead', null),
               (5, 'dead', null)) s (n, state, deliver_at)
returning 1"""


@pytest.fixture
def role(database: Database) -> Generator[str]:
    """Yield a role without any right."""
    with new_role(database, "figures") as name:
        yield name


@contextmanager
def measuring(dsn: str, relay: UUID | None = None) -> Generator[tuple[Figures, CountingStore, RecordedLog]]:
    """Yield figures of one relay, its store, and its log."""
    store, log = CountingStore(dsn), RecordedLog()
    store.open()
    try:
        yield Figures(store, relay or uuid4(), log), store, log
    finally:
        store.close()


def execute(database: Database, statement: str) -> None:
    """Run a statement that returns nothing."""
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode())


def values(figures: Figures) -> dict[tuple[str, ...], float]:
    """Return the known values by name and labels."""
    return {(value.name, *value.labels): value.value for entry, _ in figures.known() for value in entry.values}


def failed(figures: Figures) -> set[str]:
    """Return the groups that are unknown."""
    return {entry.group for entry, _ in figures.known() if entry.failed}


def test_figures_say_what_is_in_the_database(database: Database) -> None:
    query(database, REGISTER)
    query(database, "select outbox.emit('a.x', '1', key => 'k' || n) from generate_series(1, 30) n")
    query(database, ROWS)
    query(database, "select outbox.emit(t, '1', deliver_at => now() + '1 day') from unnest('{a.x,b.x}'::text[]) t")
    query(database, "update outbox.sink set paused = name = 'idle' returning 1")
    with measuring(database.dsn) as (figures, store, log):
        figures.round()
        assert (failed(figures), log.warnings) == (set(), [])
        found = values(figures)
        sentence = text("docs/observability.md").partition("`outbox_figures_failed` shows its group: ")[2]
        assert {entry.group for entry, _ in figures.known()} == set(re.findall(r"`(\w+)`", sentence.partition(". ")[0]))
        assert {name for name, *_ in found} == FIGURES.keys()
        assert store.connection_losses == 0
    states = {state: found["outbox_exceptions", "crm", state] for state in ("waiting", "scheduled", "held", "dead")}
    assert states == {"waiting": 2.0, "scheduled": 1.0, "held": 1.0, "dead": 2.0}
    assert found["outbox_backlog_events", "crm"] == 33.0
    assert found["outbox_backlog_events", "idle"] == 0.0
    assert found["outbox_oldest_exception_seconds", "crm", "dead"] == pytest.approx(300, abs=60)
    assert found["outbox_oldest_undelivered_seconds", "crm"] == pytest.approx(180, abs=60)
    assert 0.0 < found["outbox_position_lag_seconds", "crm"] < 60.0
    assert (found["outbox_paused", "crm"], found["outbox_paused", "idle"]) == (0.0, 1.0)
    assert found["outbox_shards_unowned", "crm"] == 64.0
    assert found["outbox_log_bytes",] > 8192
    assert found["outbox_lock_waits",] == found["outbox_retention_blocked",] == 0.0
    assert ("outbox_dead_tuples", "event") in found


def test_one_relay_measures_and_the_other_reads_what_it_stored(database: Database) -> None:
    query(database, REGISTER)
    with measuring(database.dsn) as (first, store, _), measuring(database.dsn) as (second, other, _):
        for _ in range(3):
            first.round()
            second.round()
        assert values(first) == values(second) != {}
        assert all(0.0 <= age < KEPT_SECONDS for _, age in second.known())
        query(database, "update outbox.figures set lease_until = '-infinity' returning 1")
        second.round()
        first.round()
        [(owner,)] = query(database, "select owner from outbox.figures")
        assert owner == second._relay  # pyright: ignore[reportPrivateUsage]
        assert store.connection_losses == other.connection_losses == 0


def test_figures_are_stored_only_under_the_newest_claim(database: Database) -> None:
    """Goes red without the fence: a relay that was stopped while it measured would overwrite newer figures."""
    first, second = uuid4(), uuid4()
    with measuring(database.dsn) as (_, store, _):
        old = store.claim_figures(first, LEASE_SECONDS)
        assert old.token is not None
        assert (store.claim_figures(second, LEASE_SECONDS)).token is None
        query(database, "update outbox.figures set lease_until = clock_timestamp() - interval '1 second' returning 1")
        assert not store.store_figures(first, old.token, {"late": 1})
        new = store.claim_figures(second, LEASE_SECONDS)
        assert new.token is not None
        assert not store.store_figures(first, old.token, {"late": 1})
        assert not store.store_figures(second, old.token, {"late": 1})
        assert store.store_figures(second, new.token, {"format": 1})
        assert (store.stored_figures())[0] == {"format": 1}


# -- groups that fail -----------------------------------------------------------------------------------------


def test_a_role_that_may_not_see_others_sessions_knows_no_oldest_transaction(database: Database, role: str) -> None:
    """Goes red when it is 0: an alert on it would never fire, although a transaction holds back VACUUM."""
    migrate(database.dsn, grant_relay=[role])
    with database.connect() as held:
        held.execute("select pg_current_xact_id()")
        with measuring(database.dsn_as(role)) as (figures, store, log):
            figures.round()
            assert failed(figures) == {"transactions"}
            assert ("outbox_oldest_transaction_seconds",) not in values(figures)
            execute(database, f"grant pg_read_all_stats to {role}")
            figures.round()
            assert failed(figures) == set()
            assert values(figures)["outbox_oldest_transaction_seconds",] > 0.0
            assert (store.connection_losses, log.warnings) == (0, [])


def test_a_group_that_runs_into_its_limit_is_unknown_and_costs_no_connection(database: Database) -> None:
    """Goes red when the client ends it: the connection would count as lost, and every session would start again."""
    query(database, REGISTER)
    with measuring(database.dsn) as (figures, store, log):
        figures.round()
        with database.connect() as other:
            other.execute("lock table outbox.event in access exclusive mode")
            other.execute("lock table outbox.delivery in access exclusive mode")
            figures.round()
            assert {"sinks", "log", "default_partition"} <= failed(figures)
            assert values(figures)["outbox_lock_waits",] == 0.0
            assert ("outbox_log_bytes",) not in values(figures)
        assert store.connection_losses == 0
        assert {event for event, _ in log.warnings} == {"figures.failed"}
        figures.round()
        assert failed(figures) == set()


def test_sinks_are_measured_in_turn_when_time_is_short(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when each round begins with the first sink: the others would never be measured."""
    names = [f"s{number}" for number in range(5)]
    sinks = [{"name": name, "patterns": ["*"]} for name in names]
    query(database, "select outbox_internal.register_sinks(%s, 0, '3:3:', 3)", Jsonb(sinks))
    left = [0]

    def one(figures: Figures, sink: str, patterns: list[str], /) -> Iterator[Entry]:
        left[0] -= 1
        return measure(figures, sink, patterns)

    def is_over(_until: float) -> bool:
        return left[0] <= 0

    measure = Figures._of_sink  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Figures, "_of_sink", one)
    monkeypatch.setattr(module, "is_over", is_over)
    with measuring(database.dsn) as (figures, _, _):
        for known in (2, 4, 5):
            left[0] = 2
            figures.round()
            found = {entry.sink for entry, _ in figures.known() if entry.group == "backlog"}
            assert found == set(names[:known])
