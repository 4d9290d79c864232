"""Work that waits for a lock, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.support.database import Database
from tests.support.wait import until

Connection = psycopg.Connection[Any]
SECONDS = 30
"""Longest wait for a lock, or for the work."""


@contextmanager
def begun(database: Database, work: Callable[[Connection], Any]) -> Generator[Future[Any]]:
    """Run ``work`` on its own connection in a thread; begin the block once it waits for a lock or is done."""
    with ThreadPoolExecutor(1) as pool, database.connect(autocommit=True) as connection:
        done = pool.submit(work, connection)
        pid = connection.info.backend_pid
        until(lambda: done.done() or waiting(database, f"pid = {pid}"), seconds=SECONDS, what="it waits for a lock")
        yield done


def waiting(database: Database, whose: str) -> bool:
    """Return True if a server process waits for a lock."""
    with database.connect() as connection:
        query = f"select from pg_stat_activity where {whose} and wait_event_type = 'Lock'"
        return connection.execute(query.encode()).fetchone() is not None
