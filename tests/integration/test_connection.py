"""The relay's connection: long answers are taken as they come, whole, and a wait can be ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from typing import LiteralString

import pytest
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from outbox_relay.postgres.connection import MOST_PIECES, Connection, _taking  # pyright: ignore[reportPrivateUsage]
from tests.support.database import Database

ROWS = "select g, repeat(chr(97 + g % 26), 400) from generate_series(1, 20000) g"


def reads(times: int) -> Generator[Wait, Ready | int, list[Ready | int]]:
    """Ask for this many reads, and return what the connection gave it."""
    told: list[Ready | int] = []
    while len(told) < times:
        told.append((yield Wait.R))
    return told


def turns(taking: Generator[Wait, Ready | int, list[Ready | int]]) -> tuple[int, list[Ready | int]]:
    """Return the number of times that it yields to the event loop, and its result."""
    count = 1
    next(taking)
    try:
        while True:
            taking.send(Ready.R)
            count += 1
    except StopIteration as end:
        return count, end.value


@pytest.fixture
def ends() -> Generator[tuple[socket.socket, socket.socket]]:
    """Yield two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_what_has_come_is_taken_without_a_turn_of_the_event_loop(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.send(b"more")
    count, told = turns(_taking(reads(10), ours.fileno()))
    assert (count, told) == (1, [Ready.R] * 10)


def test_event_loop_has_its_turn_though_more_comes(ends: tuple[socket.socket, socket.socket]) -> None:
    """Without the bound an answer that comes as fast as it is read keeps everything else of the process waiting."""
    ours, theirs = ends
    theirs.send(b"more")
    count, _ = turns(_taking(reads(10 * (MOST_PIECES + 1)), ours.fileno()))
    assert count == 10


def test_what_has_not_come_is_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    assert turns(_taking(reads(10), ours.fileno())) == (10, [Ready.R] * 10)


async def test_long_answer_comes_whole(database: Database) -> None:
    async with await Connection.connect(database.dsn, autocommit=True) as connection:
        rows = await (await connection.cursor(binary=True).execute(ROWS)).fetchall()
    assert rows == [(g, chr(97 + g % 26) * 400) for g in range(1, 20001)]


@pytest.mark.parametrize(
    "query",
    ["select pg_sleep(600)", "select repeat('x', 1000) from generate_series(1, 100000000)"],
    ids=["before the answer", "in the middle of a long answer"],
)
async def test_wait_that_is_cancelled_ends_the_statement_and_leaves_the_connection_usable(
    database: Database, query: LiteralString
) -> None:
    async with await Connection.connect(database.dsn, autocommit=True) as connection:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connection.execute(query)
        assert connection.info.transaction_status == TransactionStatus.IDLE
        assert await (await connection.execute("select 1")).fetchone() == (1,)
