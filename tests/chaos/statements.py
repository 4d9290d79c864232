"""Faults of single statements of the relays, whose connections survive: cancelled ones, and ones that meet a lock."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.database import DatabaseSide

CANCEL_SECONDS = (1.0, 3.0)
CANCEL_LIMIT_SECONDS = 30.0
"""Time limit for the first statement to be cancelled; the relays may be restarting."""
BETWEEN_SECONDS = 0.01
LOCK_SECONDS = (6.0, 8.0)
"""Range of the duration of a lock. A statement of a relay waits for one for at most 5 s."""
TABLES = ("delivery", "progress", "shard", "sink", "event")
LOCK_TIMEOUT = b"set lock_timeout = '20s'"
CANCEL = """select count(*) filter (where pg_cancel_backend(pid)) from pg_stat_activity
 where usename = %s and state = 'active'"""


def cancel(side: DatabaseSide, rng: random.Random) -> tuple[float, str]:
    """Cancel every statement of the relays that is found running, with the error of a statement that timed out."""
    from tests.chaos.database import RELAY

    began, cancelled = time.monotonic(), 0
    seconds = rng.uniform(*CANCEL_SECONDS)
    with side.connect() as connection:
        while time.monotonic() < began + (seconds if cancelled else CANCEL_LIMIT_SECONDS):
            [(count,)] = connection.execute(CANCEL, (RELAY,)).fetchall()
            cancelled += int(count)
            threading.Event().wait(BETWEEN_SECONDS)
    assert cancelled, "no statement of a relay was found running"
    return time.monotonic(), f"{cancelled} statements"


def lock(side: DatabaseSide, rng: random.Random) -> tuple[float, str]:
    """Lock a table for longer than a statement waits for it."""
    table, seconds = rng.choice(TABLES), rng.uniform(*LOCK_SECONDS)
    with side.connect() as connection:
        connection.execute(LOCK_TIMEOUT)
        with connection.transaction():
            connection.execute(f"lock table outbox.{table} in access exclusive mode".encode())
            threading.Event().wait(seconds)  # the fault itself
    return time.monotonic(), f"outbox.{table} for {seconds:.1f} s"
