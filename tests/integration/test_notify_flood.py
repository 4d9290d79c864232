"""Notifications of a role that may do nothing but connect: the relay polls, and delivers what is emitted."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from structlog.testing import capture_logs
from structlog.typing import EventDict

from outbox_relay.postgres.listener import LOCK
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.roles import new_role
from tests.support.wait import becomes

FLOOD = "select count(pg_notify('outbox', g::text || repeat('x', 100))) from generate_series(1, 2000) g"
BATCH_SECONDS = 0.02
"""Pause between two batches: enough for a flood, and little work for the machine."""
ASLEEP = "select 1 from pg_locks where locktype = 'advisory' and classid = %s and objid = %s and mode = 'ExclusiveLock'"


@contextmanager
def flood(database: Database) -> Generator[None]:
    """Send thousands of notifications a second, as a role with no more than CONNECT."""
    end = threading.Event()

    def send(stranger: str) -> None:
        with database.connect(user=stranger, autocommit=True) as connection:
            while not end.wait(BATCH_SECONDS):
                connection.execute(FLOOD)

    with new_role(database, "stranger") as stranger:
        thread = threading.Thread(target=send, args=[stranger])
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


def test_a_relay_polls_through_a_flood_and_delivers_what_is_emitted(database: Database) -> None:
    sink = MemorySink()
    with capture_logs() as log, running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        has(database, ASLEEP, *LOCK)
        with flood(database):
            becomes(lambda: _floods(log), "it has noticed the flood")
            for n in range(10):
                wanted = emit(database, [f"k{n}"])
                delivered(sink, wanted)
            assert query_locks(database) == []
    assert _floods(log) == [{"event": "database.notify_flood", "log_level": "warning", "polls_seconds": 30.0}]


def _floods(log: Sequence[EventDict]) -> list[EventDict]:
    return [line for line in log if line["event"] == "database.notify_flood"]


def query_locks(database: Database) -> list[object]:
    """Return the locks of idle relays."""
    with database.connect() as connection:
        return list(connection.execute(ASLEEP, LOCK).fetchall())
