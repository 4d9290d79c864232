"""A pass of the retention that is killed at one point: run as `python -m tests.support.power_cut POINT ARGUMENT…`.

Functions of the product are wrapped here, in the process that they run in. A point is the name of a function with `<`
(killed before it is called) or `>` (after it has returned), and may begin with a number: which of its calls is meant.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import sys
from typing import Any

from outbox_relay import cli
from outbox_relay.postgres.store import Store
from outbox_relay.retention import worker
from outbox_relay.retention.archiver import Archiver
from outbox_relay.retention.files import Folder

PARENT: dict[str, Any] = {
    "check_day": Store,
    "begin_archive": Store,
    "_run": Archiver,
    "record_archive": Store,
    "empty_day": Store,
    "drop_day": Store,
}
CHILD: dict[str, Any] = {
    "read_day": Store,
    "_stream": Folder,
    "_make_durable": Folder,
    "verify": worker,
    "write": Folder,
}
POINTS = [
    *(f"{name}{when}" for name in PARENT for when in "<>"),
    *(f"{name}{when}" for name in CHILD for when in "<>"),
    *(f"2{name}{when}" for name in ("empty_day", "begin_archive") for when in "<>"),
]
DECISIVE = "empty_day<"
"""The point at which the archive is recorded, and the day is not yet empty."""


def die() -> None:
    """End this process as a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, when: str, call: int) -> None:
    """Kill this process at that call of the function."""
    inner = getattr(owner, name)
    calls = 0

    def is_the_one() -> bool:
        nonlocal calls
        calls += 1
        return calls == call

    @functools.wraps(inner)
    async def later(*arguments: Any, **named: Any) -> Any:
        meant = is_the_one()
        if meant and when == "<":
            die()
        result = await inner(*arguments, **named)
        if meant:
            die()
        return result

    @functools.wraps(inner)
    def now(*arguments: Any, **named: Any) -> Any:
        meant = is_the_one()
        if meant and when == "<":
            die()
        result = inner(*arguments, **named)
        if meant:
            die()
        return result

    setattr(owner, name, later if inspect.iscoroutinefunction(inner) else now)


def prepare(point: str, places: dict[str, Any]) -> None:
    """Wrap the function of a point, if this kind of process has it."""
    call = int(point[0]) if point[0].isdigit() else 1
    name = point.lstrip("0123456789")[:-1]
    if name in places:
        wrap(places[name], name, point[-1], call)


def main() -> int:
    """Run the command, or the process that writes an archive, with the point wrapped."""
    point, *arguments = sys.argv[1:]
    if not arguments:
        prepare(point, CHILD)
        worker.main()
    prepare(point, PARENT)
    inner = asyncio.create_subprocess_exec

    async def spawn(program: str, *_: str, **named: Any) -> Any:
        return await inner(program, "-m", "tests.support.power_cut", point, **named)

    asyncio.create_subprocess_exec = spawn
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
