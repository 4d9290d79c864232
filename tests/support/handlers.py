"""Handlers that tests of the Python sink call in worker processes. They write what they get to a file."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import outbox_relay
from tests.support.wait import auntil

DIRECTORY = Path(os.environ.get("HANDLERS_DIRECTORY", "/nonexistent"))
POISON = b"poison"

if (DIRECTORY / "down").exists():
    raise RuntimeError("this application is down")


def record(delivery: outbox_relay.Delivery) -> None:
    """Append the delivery to the file."""
    line = {
        "key": delivery.key,
        "uid": str(delivery.uid),
        "payload": base64.b64encode(delivery.payload).decode(),
        "type": delivery.type,
        "content_type": delivery.content_type,
        "headers": dict(delivery.headers),
        "attempt": delivery.attempt,
        "tenant": delivery.tenant,
    }
    with (DIRECTORY / "received").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


async def _is_extended() -> bool:
    return (DIRECTORY / "extended").exists()


def contract(delivery: outbox_relay.Delivery) -> None:
    """Refuse poison, and record everything else."""
    if delivery.payload == POISON:
        raise outbox_relay.Dead("poison")
    record(delivery)


async def acontract(delivery: outbox_relay.Delivery) -> None:
    """Do as the plain one does."""
    contract(delivery)


def _is_first(delivery: outbox_relay.Delivery, name: str) -> bool:
    """Return True once for an event and a name, across processes."""
    try:
        (DIRECTORY / f"{name}-{delivery.uid}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _note(name: str, line: str) -> None:
    with (DIRECTORY / name).open("a") as file:
        file.write(f"{line}\n")


class Abrupt(BaseException):
    """An exception that is no Exception."""


def _misbehave(delivery: outbox_relay.Delivery, what: str) -> None:
    """Do as the payload says. What returns is recorded by the caller."""
    match what:
        case "retry" if delivery.attempt == 1:
            raise outbox_relay.Retry(after=0.1, reason="busy")
        case "dead":
            raise outbox_relay.Dead("no such customer")
        case "raise":
            raise ValueError("x" * 1000)
        case "base":
            raise Abrupt("abrupt")
        case "exit":
            sys.exit(3)
        case "block":
            time.sleep(300)
        case "brief":
            time.sleep(0.7)
        case _:
            pass


async def asynchronous(delivery: outbox_relay.Delivery) -> None:
    """Misbehave in the event loop."""
    what = str(delivery.json())
    _note("calls", what)
    if what == "sleep":
        await asyncio.sleep(300)
    if what == "stubborn":
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(300)
    if what == "extend":
        delivery.extend(8)
        await auntil(_is_extended, seconds=60, what="the test has seen it")
    _misbehave(delivery, what)
    record(delivery)


def plain(delivery: outbox_relay.Delivery) -> None:
    """Misbehave in a thread."""
    what = str(delivery.json())
    _note("calls", what)
    _misbehave(delivery, what)
    record(delivery)


def _kill(delivery: outbox_relay.Delivery, step: str) -> None:
    """Kill the relay at the step that the payload names, once for the event."""
    if delivery.json() == step and _is_first(delivery, "killed"):
        os.kill(os.getpid(), signal.SIGKILL)


def transactional(delivery: outbox_relay.Delivery) -> None:
    """Write the effect of the event in the transaction of the delivery."""
    _kill(delivery, "before")
    if delivery.json() == "commit":
        delivery.connection.commit()
    if delivery.json() == "commit statement":
        delivery.connection.execute("/* now */ COMMIT")
    if delivery.json() == "hidden failure":
        with suppress(Exception):
            delivery.connection.execute("select 1/0")
        return
    delivery.connection.execute("insert into effects (uid) values (%s)", (delivery.uid,))
    _kill(delivery, "after")


async def atransactional(delivery: outbox_relay.Delivery) -> None:
    """Do as the plain one does."""
    _kill(delivery, "before")
    if delivery.json() == "commit":
        await delivery.connection.commit()
    await delivery.connection.execute("insert into effects (uid) values (%s)", (delivery.uid,))
    _kill(delivery, "after")


def no_argument() -> None:
    """Take nothing, which a handler must not."""


def generator(_delivery: outbox_relay.Delivery) -> Generator[None]:
    """Yield, which a handler must not."""
    yield


def hang_at_first(_delivery: outbox_relay.Delivery) -> None:
    """Hang for an hour in the first call, and return at once from every other one."""
    if next(_calls) == 0:
        time.sleep(3600)


_calls = itertools.count()
