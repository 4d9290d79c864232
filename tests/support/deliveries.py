"""Events of a test, and what a scripted sink has received of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from tests.support.database import Asker, Database
from tests.support.memory_sink import MemorySink
from tests.support.wait import auntil


def emit(database: Database, keys: Iterable[str | None], **options: Any) -> list[int]:
    """Emit one event per key in one transaction and return their ids."""
    with database.connect() as connection:
        uids = outbox.emit_many(
            connection, [outbox.Event("test.event", {"n": n}, key=key, **options) for n, key in enumerate(keys)]
        )
        rows = connection.execute("select id from outbox.event where uid = any(%s) order by id", (uids,)).fetchall()
    return [row[0] for row in rows]


def ids(sink: MemorySink) -> list[int]:
    """Return the ids of the delivered events in the order of delivery."""
    return [event.id for event in sink.delivered]


def first_deliveries(events: Sequence[StoredEvent]) -> dict[str | None, list[int]]:
    """Return the ids of each key in the order of their first delivery."""
    found: dict[str | None, list[int]] = {}
    for event in events:
        seen = found.setdefault(event.key, [])
        if event.id not in seen:
            seen.append(event.id)
    return found


def in_order(events: Sequence[StoredEvent]) -> bool:
    """Return True if the first deliveries of every key came in the order of ids."""
    return all(seen == sorted(seen) for key, seen in first_deliveries(events).items() if key is not None)


async def delivered(sink: MemorySink, wanted: Iterable[int], seconds: float = 20) -> None:
    """Wait until all events in `wanted` have been delivered."""
    missing = set(wanted)

    async def fact() -> bool:
        return not missing - set(ids(sink))

    await auntil(fact, seconds=seconds, what=f"{len(missing)} events are delivered")


async def has(database: Database, text: str, *parameters: Any, seconds: float = 20) -> list[tuple[Any, ...]]:
    """Wait until a query has rows and return them."""

    asker = Asker(database)

    async def fact() -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(asker.ask, text, *parameters)

    with closing(asker):
        return await auntil(fact, seconds=seconds, what=text)
