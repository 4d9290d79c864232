"""Handlers that tests call in workers of a Python sink without a relay. Each does as its payload says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import psycopg

import outbox_relay
from tests.support.wait import auntil

DIRECTORY = Path(os.environ.get("HANDLERS_DIRECTORY", "/nonexistent"))
SEEN: ContextVar[str] = ContextVar("SEEN", default="")

if os.environ.get("HANDLERS_END"):  # a module whose process does not live long

    def _end() -> None:
        time.sleep(0.1)
        os._exit(7)

    import threading

    threading.Thread(target=_end).start()


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


def _odd_retry() -> outbox_relay.Retry:
    error = outbox_relay.Retry(reason="odd")
    error.after = "soon"  # type: ignore[assignment]
    return error


def _late_retry() -> outbox_relay.Retry:
    error = outbox_relay.Retry()
    error.after, error.reason = float("nan"), 5  # type: ignore[assignment]
    return error


async def _work() -> None:
    (DIRECTORY / "worked").touch()


def _generator() -> Generator[int]:
    yield 1


async def _async_generator() -> AsyncGenerator[int]:
    yield 1


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": lambda: _raise(ValueError("a\nb\x1b[31m")),
    "base": lambda: _raise(BaseException("base")),
    "exit": lambda: sys.exit(3),
    "keyboard": lambda: _raise(KeyboardInterrupt()),
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "cancelled future": lambda: _raise(CancelledError()),
    "no more": lambda: next(iter(())),
    "unspeakable": lambda: _raise(Unspeakable()),
    "huge": lambda: _raise(ValueError("x" * 50_000_000)),
    "surrogates": lambda: _raise(ValueError("\ud800é\x00")),
    "named as ours": lambda: _raise(DatabaseDown("mine")),
    "retry in an hour": lambda: _raise(outbox_relay.Retry(after=3600, reason="busy")),
    "bare retry": lambda: _raise(BareRetry()),
    "bare dead": lambda: _raise(BareDead()),
    "odd retry": lambda: _raise(_odd_retry()),
    "late retry": lambda: _raise(_late_retry()),
    "a coroutine": _work,
    "a generator": _generator,
    "an asynchronous generator": _async_generator,
    "a group": lambda: _raise(BaseExceptionGroup("both", [SystemExit(1), ValueError("x")])),
    "a task asks": lambda: _raise(ExceptionGroup("", [ExceptionGroup("", [outbox_relay.Retry(reason="busy")])])),
    "printed nowhere": lambda: print("x", file=_raise(OSError("closed"))),
}
"""Faults that cost one event its attempt, and their process nothing."""


def _common(delivery: outbox_relay.Delivery, what: str) -> Any:  # noqa: C901 - one case each
    if (fault := FAULTS.get(what)) is not None:
        return fault()
    match what:
        case "die":
            os._exit(4)
        case "die once" if _is_first(delivery):
            os._exit(4)
        case "block":
            time.sleep(300)
        case "eat":
            held = [bytearray(b"x" * (1 << 20)) for _ in range(100)]
            time.sleep(300)
            held.clear()
        case "block a while":
            time.sleep(0.7)
        case "fork and die":
            if not os.fork():
                os.setsid()
                time.sleep(300)
            os._exit(4)
        case "start a program and die":
            subprocess.Popen(["sleep", "300"], close_fds=False, start_new_session=True)  # noqa: S607
            os._exit(4)
        case "start a program":
            _note("orphan", subprocess.Popen(["sleep", "300"]).pid)  # noqa: S607
        case "fork and return":
            if not (child := os.fork()):
                return None
            _note("child", child)
        case "stop a program":
            program = subprocess.Popen(["sleep", "300"])  # noqa: S607
            program.terminate()
            if program.wait() != -signal.SIGTERM:
                raise RuntimeError("the program ignores signals")
        case "print a lot":
            print("x" * 100_000 + "\n" * 100_000 + "y\n" * 100_000 + "last")  # noqa: T201
        case "lose stdout":
            sys.stdout.close()
            sys.stdout = None  # type: ignore[assignment]
        case "context":
            found = SEEN.get()
            SEEN.set("the value of an earlier event")
            if found:
                raise RuntimeError(found)
        case "extend often":
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                delivery.extend(30)
        case "extend":
            deadline = delivery.deadline
            delivery.extend(0.001)
            delivery.extend(60)
            later = delivery.deadline
            delivery.extend(5)
            if not deadline < later == delivery.deadline:
                raise RuntimeError("the deadline went back")
        case _:
            _note("received", what)
    return None


def _note(name: str, value: object) -> None:
    with (DIRECTORY / name).open("a") as file:
        file.write(f"{value}\n")


def _is_first(delivery: outbox_relay.Delivery) -> bool:
    try:
        (DIRECTORY / str(delivery.uid)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def _is_told() -> bool:
    return (DIRECTORY / "told").exists()


async def asynchronous(delivery: outbox_relay.Delivery) -> Any:
    """Do as the payload says, in the event loop."""
    what = delivery.payload.decode()
    match what:
        case "sleep":
            _note("began", what)
            await asyncio.sleep(300)
        case "stubborn":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(300)
        case "nap":
            _note("began", what)
            await asyncio.sleep(0.3)
            _note("received", what)
        case "wait":
            _note("steps", "begins")
            await auntil(_is_told, seconds=60, what="the test tells it to end")
            _note("steps", "ends")
        case "stop the loop":
            asyncio.get_running_loop().stop()
        case "extend":
            _common(delivery, what)
            await asyncio.sleep(0.8)
        case _:
            return _common(delivery, what)
    return None


def plain(delivery: outbox_relay.Delivery) -> Any:
    """Do as the payload says, in a thread."""
    what = delivery.payload.decode()
    match what:
        case "sleep":
            _note("began", what)
            time.sleep(300)
        case "sleep longer":
            delivery.extend(60)
            time.sleep(300)
        case "nap":
            _note("began", what)
            time.sleep(0.3)
            _note("received", what)
        case "extend":
            _common(delivery, what)
            time.sleep(0.8)
        case _:
            return _common(delivery, what)
    return None


# -- transactions -------------------------------------------------------------------------------------------------

HELD: list[Any] = []
"""Blocks that were entered and not left: the garbage collector would leave them."""


def _held(block: Any) -> Any:
    HELD.append(block)
    return block


INSERT = "insert into effects (uid) values (%s)"


def transactional(delivery: outbox_relay.Delivery) -> Any:  # noqa: C901 - one case each
    """Write the effect of the event, and do as the payload says, with ``delivery.connection``."""
    connection, what = delivery.connection, delivery.payload.decode()
    connection.execute(INSERT, (delivery.uid,))
    match what:
        case "commit":
            connection.commit()
        case "commit statement":
            connection.execute("/* now */ COMMIT")
        case "script":
            connection.execute("select ';'; commit")
        case "many":
            connection.cursor().executemany("commit", [()])
        case "stream":
            list(connection.cursor().stream("commit"))
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
            await connection.execute("/* now */ COMMIT")
        case "script":
            await connection.execute("select ';'; commit")
        case "many":
            await connection.cursor().executemany("commit", [()])
        case "stream":
            async for _ in connection.cursor().stream("commit"):
                pass
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
        case "named as ours":
            raise DatabaseDown("mine")
        case _:
            pass
    return None
