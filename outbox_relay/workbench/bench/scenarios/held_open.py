"""Drain while another transaction stays open."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import psycopg

from outbox_relay.workbench.bench.database import BenchDatabase
from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 100_000, 1_000_000


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the drain with and without the transaction; the order alternates between runs."""
    events = bench.scaled_events(QUICK, FULL)
    open_first = bench.run_number % 2 == 0
    found = {is_open: _drained(bench, events, is_open=is_open) for is_open in (open_first, not open_first)}
    (own, bare), (own_open, bare_open) = found[False], found[True]
    return [
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("bare loop, transaction open", bare_open, EVENTS_PER_SECOND),
        Figure("relay", own, EVENTS_PER_SECOND),
        Figure("relay, transaction open", own_open, EVENTS_PER_SECOND),
        ratio("relay: open / not open", own_open, own),
        ratio("relay / bare loop, transaction open", own_open, bare_open),
    ]


def _drained(bench: BenchEnvironment, events: int, *, is_open: bool) -> tuple[float, float]:
    """Return the rates of the relay and of the bare loop."""
    database = bench.new_database()
    with _transaction(database) if is_open else contextlib.nullcontext():
        database.fill(events, bench.check)
        database.settle()
        bare = steps.run_bare_loop(bench, database, events)
        config, count = steps.relay_to_kafka(bench, database)
        return steps.drain(bench, config, count, events).per_second, bare


@contextlib.contextmanager
def _transaction(database: BenchDatabase) -> Generator[None]:
    """Keep a transaction with an assigned id open."""
    with psycopg.connect(database.dsn) as connection:
        connection.execute("select pg_current_xact_id()")
        yield
        connection.rollback()


SCENARIO = Scenario(
    "held-open",
    "The same drain with and without an open transaction that began before the first event.",
    measure,
)
