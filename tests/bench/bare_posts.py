"""Program that posts the log to a webhook in a bare loop, in id order, with plain aiohttp.

It does not sign, keep order per key or limit anything; it records progress per batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

import aiohttp
import psycopg
from yarl import URL

from tests.bench.bare_loop import DSN

BATCH = 4_000
TIMEOUT_SECONDS = 30.0
READ = """select id, uid::text, type, key, payload, coalesce(content_type, 'application/json')
  from outbox.event where id > %s order by id limit %s"""


async def relay(dsn: str, url: str, at_once: int) -> int:
    """Post all committed events with `at_once` concurrent requests. Return their number."""
    target, count, last = URL(url), 0, 0
    connector = aiohttp.TCPConnector(limit=at_once)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table if not exists bare_progress (last_id bigint)")
        cursor = connection.cursor(binary=True)
        async with aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        ) as session:
            while rows := cursor.execute(READ, (last, BATCH), prepare=True).fetchall():
                pending = iter(rows)
                await asyncio.gather(*(_post_all(session, target, pending) for _ in range(at_once)))
                last = rows[-1][0]
                count += len(rows)
                connection.execute("insert into bare_progress values (%s)", (last,), prepare=True)
    return count


async def _post_all(session: aiohttp.ClientSession, url: URL, rows: Any) -> None:
    for _, uid, kind, key, payload, content_type in rows:
        headers = {"webhook-id": uid, "outbox-type": kind, "outbox-key": key, "content-type": content_type}
        async with session.post(url, data=payload, headers=headers, allow_redirects=False) as answer:
            await answer.read()


def main() -> int:
    """Run the bare loop."""
    parser = argparse.ArgumentParser(prog="bench: bare posts")
    parser.add_argument("--url", required=True)
    parser.add_argument("--at-once", type=int, required=True)
    arguments = parser.parse_args()
    asyncio.run(relay(os.environ[DSN], arguments.url, arguments.at_once))
    return 0


if __name__ == "__main__":
    sys.exit(main())
