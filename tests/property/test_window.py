"""The window is complete: writers that do whatever transactions can do, read by ticks and windows in small chunks.

The oracle: every committed event is read exactly once, nothing that was rolled back is read, and each key comes in the
order in which its writers held its lock. The negative control is in the same run: two more followers of the same log
that leave out a part of what is pending at a tick, and must lose events.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Sequence

import psycopg
import pytest

from outbox_relay.postgres.migrations import migrate
from tests.property.follower import ALL, Follower, OnlyWhenMoved, WithoutList, WithoutRange, opened
from tests.property.numbering import WRAP, burn_to, move_near_the_wrap, set_epoch
from tests.property.writers import SLOW_KEY, TABLES, Verdict, Writers, emit, emit_next, judge
from tests.support.database import Database
from tests.support.postgres import PostgresServer

SOUND = Verdict(lost=0, extra=0, disordered=0)
log = logging.getLogger(__name__)
LONG_SECONDS, SHORT_SECONDS = 6.0, 3.0
BEFORE_THE_WRAP = 1500
"""Transactions that are left before the wrap when the writers begin."""


def follow_writers(dsn: str, seed: int, seconds: float) -> tuple[Writers, Sequence[Follower]]:
    """Let writers work for ``seconds`` and followers follow; both are done when this returns."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLES)
    writers = Writers(dsn, seed)
    with opened(dsn) as store:
        followers = [kind(store, seed=seed) for kind in ALL]
        until = time.monotonic() + seconds
        with writers.at_work():
            while time.monotonic() < until:
                for follower in followers:
                    follower.follow()
        newest_transaction(dsn, followers)
    log.warning("%s transactions, %s events", writers.done, sum(writers.committed().values()))
    return writers, followers


def newest_transaction(dsn: str, followers: Sequence[Follower]) -> None:
    """Follow the newest transaction while it is open, once it has committed, and once another has emitted.

    No control is left to chance by it: nothing newer has finished at the first tick, and no id is taken until the
    second.
    """
    with psycopg.connect(dsn) as newest:
        emit_next(newest, SLOW_KEY)
        for follower in followers:
            follower.follow()
    for follower in followers:
        follower.follow()
    with psycopg.connect(dsn) as another:
        emit_next(another, SLOW_KEY)
    for follower in followers:
        follower.follow()


def xids(dsn: str) -> tuple[int, int]:
    """Return the smallest and the largest xid in the log."""
    with psycopg.connect(dsn) as connection:
        query = "select min(xid::text::bigint), max(xid::text::bigint) from outbox.event"
        return connection.execute(query).fetchall()[0]


def prepared(server: PostgresServer) -> str:
    """Return the connection string of a new database with the schema."""
    server.create_database("log")
    migrate(server.dsn("log"))
    return server.dsn("log")


@pytest.fixture
def seed() -> int:
    """Return the seed of the writers and the chunks: OUTBOX_TEST_SEED, or a new one, which a failure shows."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED") or random.randrange(2**31))
    log.warning("OUTBOX_TEST_SEED=%s", seed)
    return seed


def test_window_is_complete_and_loses_without_pending(database: Database, seed: int) -> None:
    writers, followers = follow_writers(database.dsn, seed, LONG_SECONDS)
    follower, without_range, without_list, looking, only_when_moved = followers
    committed = writers.committed()
    assert judge(committed, follower.got) == SOUND
    assert any(piece.late and ids for piece, ids in follower.reads), "no latecomer came: the run shows nothing"
    assert {"slow", "emits", "silent", "storm", "rolled back"} == writers.done.keys()
    assert isinstance(without_range, WithoutRange)
    assert judge(committed, without_range.got).lost > 0
    assert isinstance(without_list, WithoutList)
    assert judge(committed, without_list.got).lost > 0
    assert judge(committed, looking.got) == SOUND
    assert looking.windows, "no window came with its tick: the run shows nothing"
    assert isinstance(only_when_moved, OnlyWhenMoved)
    assert judge(committed, only_when_moved.got).lost > 0


@pytest.mark.slow  # the next one passes from below 32 bits to beyond
def test_window_is_complete_beyond_32_bits(own_postgres: PostgresServer, seed: int) -> None:
    set_epoch(own_postgres, 3)
    dsn = prepared(own_postgres)
    writers, (follower, without_range, without_list, looking, moved) = follow_writers(dsn, seed, SHORT_SECONDS)
    assert xids(dsn)[0] > 3 * WRAP
    assert judge(writers.committed(), follower.got) == SOUND
    assert judge(writers.committed(), looking.got) == SOUND
    assert judge(writers.committed(), without_range.got).lost > 0
    assert judge(writers.committed(), without_list.got).lost > 0
    assert judge(writers.committed(), moved.got).lost > 0


@pytest.mark.slow  # has a server whose numbers have to wrap
def test_window_is_complete_across_the_wrap(own_postgres: PostgresServer, seed: int) -> None:
    move_near_the_wrap(own_postgres)
    dsn = prepared(own_postgres)
    burn_to(dsn, WRAP - BEFORE_THE_WRAP)
    writers, (follower, without_range, without_list, looking, moved) = follow_writers(dsn, seed, SHORT_SECONDS)
    first, last = xids(dsn)
    assert first < WRAP < last
    assert judge(writers.committed(), follower.got) == SOUND
    assert judge(writers.committed(), looking.got) == SOUND
    assert judge(writers.committed(), without_range.got).lost > 0
    assert judge(writers.committed(), without_list.got).lost > 0
    assert judge(writers.committed(), moved.got).lost > 0


@pytest.mark.slow  # the same
def test_tick_counts_the_transactions_on_both_sides_of_the_wrap(own_postgres: PostgresServer) -> None:
    move_near_the_wrap(own_postgres)
    dsn = prepared(own_postgres)
    burn_to(dsn, WRAP - 500)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLES)
    with opened(dsn) as store:
        follower = Follower(store)
        with psycopg.connect(dsn) as below, psycopg.connect(dsn) as across, psycopg.connect(dsn) as above:
            emit(below, "key", 1)
            emit(across, "key", 2)
            across.execute("select storm(1000)")
            emit(above, "key", 3)
            tick = follower.follow()
            assert tick.xmax < WRAP < tick.next_xid
            with psycopg.connect(dsn) as following:
                assert following.execute("select pg_current_xact_id()::text::bigint").fetchone() == (tick.next_xid,)
            for connection in (above, below, across):
                connection.commit()
                follower.follow()
    assert [json.loads(event.payload)["n"] for event in follower.got] == [3, 1, 2]
