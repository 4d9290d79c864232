"""Handlers of the suite's python sinks, called in the relays' child processes.

A line of a file is written by one `write`, so it survives SIGKILL from then on. An effect is a row of the application.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from outbox_relay import Delivery

EFFECTS = "chaos_effect"
"""Table of the application, without any constraint: a repeated effect is a second row."""
DIRECTORY = "CHAOS_DIRECTORY"
"""Environment variable with the directory of the files."""
CALLS, TICKS = "calls.journal", "ticks.journal"
WORK_SECONDS = 0.002
INSERT = f"insert into public.{EFFECTS} (uid, payload, began, ended) values (%s, %s, %s, %s)".encode()


async def call(delivery: Delivery) -> None:
    """Work a little, then record the uid and the times of the begin and the end."""
    began = time.monotonic()
    await asyncio.sleep(WORK_SECONDS)
    name = TICKS if delivery.type.startswith("tick.") else CALLS
    line = f"{time.monotonic():.4f}\t{delivery.uid}\t{began:.4f}\t\t\t".encode() + delivery.payload + b"\n"
    file = os.open(Path(os.environ[DIRECTORY]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


async def effect(delivery: Delivery) -> None:
    """Insert a row in the transaction of the delivery. Nothing but the mark of the event keeps it from being twice."""
    began = time.monotonic()
    await asyncio.sleep(WORK_SECONDS)
    values = delivery.uid, delivery.payload.decode(), began, time.monotonic()
    await delivery.connection.execute(INSERT, values)
