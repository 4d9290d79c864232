"""Program that calls a handler for the events of the log in a bare asyncio loop, without any code of the relay.

It reads the rows in id order in claims of 50 while earlier ones are handled, and records progress per claim. It has no
leases, no worker process, no time limits and no retries, and may not run twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg

from outbox_relay.delivery import Delivery
from tests.bench import handlers
from tests.bench.bare_loop import DSN

CLAIM = 50
READ = """select id, uid, type, key, payload, coalesce(content_type, 'application/json'), created_at
  from outbox.event where id > %s
order by id limit %s"""
HANDLERS = {handler.__name__: handler for handler in (handlers.brief, handlers.empty)}
Handler = Callable[[Delivery], Awaitable[None]]


class BareQueue:
    """Calls `handler` for every event, `at_once` at a time."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], handler: Handler, at_once: int) -> None:
        self._connection = connection
        self._handler = handler
        self._at_once = at_once
        self._rows: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue(CLAIM)

    async def run(self) -> None:
        """Handle all committed events."""
        await self._connection.execute("create table if not exists bare_progress (last_id bigint)")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._at_once):
                tasks.create_task(self._work())
            await self._feed()

    async def _feed(self) -> None:
        cursor = self._connection.cursor(binary=True)
        last = 0
        while rows := await (await cursor.execute(READ, (last, CLAIM), prepare=True)).fetchall():
            for row in rows:
                await self._rows.put(row)
            last = rows[-1][0]
            await self._connection.execute("insert into bare_progress values (%s)", (last,), prepare=True)
        for _ in range(self._at_once):
            await self._rows.put(None)

    async def _work(self) -> None:
        while (row := await self._rows.get()) is not None:
            _, uid, kind, key, payload, content_type, created_at = row
            await self._handler(_delivery(uid, kind, key, payload, content_type, created_at))


def _delivery(uid: UUID, kind: str, key: str | None, payload: bytes, content_type: str, created: datetime) -> Delivery:
    return Delivery(uid, kind, key, payload, content_type, {}, 1, created, None, datetime.now(UTC))


async def relay(dsn: str, handler: Handler, at_once: int) -> None:
    """Call `handler` for all committed events."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await BareQueue(connection, handler, at_once).run()


def main() -> int:
    """Run the bare queue."""
    parser = argparse.ArgumentParser(prog="bench: bare queue")
    parser.add_argument("--handler", choices=list(HANDLERS), required=True)
    parser.add_argument("--at-once", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(relay(os.environ[DSN], HANDLERS[arguments.handler], arguments.at_once))
    return 0


if __name__ == "__main__":
    sys.exit(main())
