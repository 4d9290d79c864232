"""The relay's connection to the database: it takes a long answer as fast as it comes.

libpq hands over 16 KB of an answer at a time, and psycopg goes back to the event loop for each: a hundred times for a
chunk of events, which costs as much as the events themselves, and more while another thread works.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from typing import Any, TypeVar

from psycopg import AsyncConnection
from psycopg.waiting import Ready, Wait

T = TypeVar("T")

MOST_PIECES = 16
"""Pieces of an answer that are taken before the event loop has its turn."""


class Connection(AsyncConnection[Any]):
    """As psycopg's, but for how it waits."""

    async def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Do what ``gen`` does, as the method of psycopg that this is instead of."""
        return await super().wait(_taking(gen, self.pgconn.socket), *args, **kwargs)


def _taking(gen: Generator[Wait, Ready | int, T], socket: int) -> Generator[Wait, Ready | int, T]:
    """``gen``, which is told without a wait that there is more to read, while there is."""
    arrived = select.poll()
    arrived.register(socket, select.POLLIN)
    try:
        wanted = next(gen)
        while True:
            wanted = gen.send((yield wanted))
            for _ in range(MOST_PIECES):
                if wanted is not Wait.R or not arrived.poll(0):
                    break
                wanted = gen.send(Ready.R)
    except StopIteration as end:
        result: T = end.value
        return result
