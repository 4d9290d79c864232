"""Handlers that tests call in a Python sink without a relay. Each does as its payload says."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NoReturn
from uuid import UUID

import psycopg

import outbox_relay

RECEIVED: list[str] = []
"""The events that were handled."""
RELEASE = threading.Event()
"""Ends handlers that ignore their time limit."""
SEEN: ContextVar[str] = ContextVar("SEEN", default="")
MOST_SECONDS = 20.0


class Unspeakable(Exception):
    """An exception whose message ends the interpreter."""

    def __str__(self) -> str:
        raise SystemExit(9)


class BareRetry(outbox_relay.Retry):
    """A subclass that forgets its base."""

    def __init__(self) -> None:
        """Set nothing."""


class BareDead(outbox_relay.Dead):
    """A subclass that forgets its base."""

    def __init__(self) -> None:
        """Set nothing."""


class DatabaseDown(Exception):
    """An exception of the application that has the name of one of ours."""


def _raise(error: BaseException) -> NoReturn:
    raise error


async def _work() -> None:
    RECEIVED.append("worked")


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(ValueError("a\nb\x1b[31m")),
    "base": lambda: _raise(BaseException("base")),
    "exit": lambda: sys.exit(3),
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "unspeakable": lambda: _raise(Unspeakable()),
    "huge": lambda: _raise(ValueError("x" * 50_000_000)),
    "surrogates": lambda: _raise(ValueError("\ud800é\x00")),
    "retry in an hour": lambda: _raise(outbox_relay.Retry(after=3600, reason="busy")),
    "bare retry": lambda: _raise(BareRetry()),
    "bare dead": lambda: _raise(BareDead()),
    "a coroutine": _work,
    "a group": lambda: _raise(BaseExceptionGroup("both", [SystemExit(1), ValueError("x")])),
    "a task asks": lambda: _raise(ExceptionGroup("", [ExceptionGroup("", [outbox_relay.Retry(reason="busy")])])),
}
"""Faults that cost one event its attempt, and their process nothing."""


def _common(delivery: outbox_relay.Delivery, what: str) -> Any:
    if (fault := FAULTS.get(what)) is not None:
        return fault()
    match what:
        case "hang":
            RELEASE.wait(MOST_SECONDS)
        case "block a while":
            time.sleep(0.7)
        case "context":
            if found := SEEN.get():
                raise RuntimeError(found)
            SEEN.set("the value of an earlier event")
        case "extend":
            deadline = delivery.deadline
            delivery.extend(0.001)
            delivery.extend(60)
            later = delivery.deadline
            delivery.extend(5)
            if not deadline < later == delivery.deadline:
                raise RuntimeError("the deadline went back")
        case _:
            RECEIVED.append(what)
    return None


async def asynchronous(delivery: outbox_relay.Delivery) -> Any:
    """Do as the payload says, in the event loop."""
    what = delivery.payload.decode()
    match what:
        case "sleep":
            await asyncio.sleep(300)
        case "stubborn":
            while not RELEASE.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
        case "nap":
            await asyncio.sleep(0.3)
            RECEIVED.append(what)
        case "stop the loop":
            asyncio.get_running_loop().stop()
        case "leave a task":
            await asyncio.wait([asyncio.create_task(_leave())])
        case "extend":
            _common(delivery, what)
            await asyncio.sleep(0.8)
        case _:
            return _common(delivery, what)
    return None


async def _leave() -> NoReturn:
    sys.exit(3)


def plain(delivery: outbox_relay.Delivery) -> Any:
    """Do as the payload says, in a thread."""
    what = delivery.payload.decode()
    match what:
        case "nap":
            time.sleep(0.3)
            RECEIVED.append(what)
        case "extend":
            _common(delivery, what)
            time.sleep(0.8)
        case _:
            return _common(delivery, what)
    return None


# -- transactions -------------------------------------------------------------------------------------------------

LOST: set[UUID] = set()


def _is_first(delivery: outbox_relay.Delivery) -> bool:
    is_first = delivery.uid not in LOST
    LOST.add(delivery.uid)
    return is_first


HELD: list[Any] = []
"""Blocks that were entered and not left: the garbage collector would leave them."""


def _held(block: Any) -> Any:
    HELD.append(block)
    return block


def columns(cursor: Any) -> Any:
    """Make rows with a factory that needs columns, as one in the documentation of psycopg does."""
    names = [column.name for column in cursor.description]

    def row(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    return row


INSERT = "insert into effects (uid) values (%s)"


def transactional(delivery: outbox_relay.Delivery) -> Any:  # noqa: C901 - one case each
    """Write the effect of the event, and do as the payload says, with ``delivery.connection``."""
    connection, what = delivery.connection, delivery.payload.decode()
    connection.execute(INSERT, (delivery.uid,))
    match what:
        case "commit":
            connection.commit()
        case "commit statement":
            connection.execute("commit")
        case "hidden failure":
            with suppress(psycopg.Error):
                connection.execute("select 1/0")
        case "rollback":
            raise psycopg.Rollback
        case "close":
            connection.close()
        case "pipeline":
            _held(connection.pipeline()).__enter__()
        case "open block":
            _held(connection.transaction()).__enter__()
        case "a coroutine":
            return _work()
        case "lose the connection":
            with suppress(psycopg.Error):
                connection.execute("select pg_terminate_backend(pg_backend_pid())")
        case "lose it once" if _is_first(delivery):
            connection.execute("select pg_terminate_backend(pg_backend_pid())")
        case "row factory":
            connection.row_factory = columns
        case "named as ours":
            raise DatabaseDown("mine")
        case _:
            pass
    return None


async def atransactional(delivery: outbox_relay.Delivery) -> Any:  # noqa: C901 - one case each
    """Do as the plain one does."""
    connection, what = delivery.connection, delivery.payload.decode()
    await connection.execute(INSERT, (delivery.uid,))
    match what:
        case "commit":
            await connection.commit()
        case "commit statement":
            await connection.execute("commit")
        case "hidden failure":
            with suppress(psycopg.Error):
                await connection.execute("select 1/0")
        case "rollback":
            raise psycopg.Rollback
        case "close":
            await connection.close()
        case "pipeline":
            await _held(connection.pipeline()).__aenter__()
        case "open block":
            await _held(connection.transaction()).__aenter__()
        case "a coroutine":
            return _work()
        case "lose the connection":
            with suppress(psycopg.Error):
                await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        case "lose it once" if _is_first(delivery):
            await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        case "row factory":
            connection.row_factory = columns
        case "named as ours":
            raise DatabaseDown("mine")
        case _:
            pass
    return None
