"""The main function of a worker process: it takes its task from the relay, imports the handler, and serves calls."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

from outbox_relay import __version__
from outbox_relay.worker import guards
from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import LENGTHS, MOST_HEAD, Frame, FrameReader, frame, item
from outbox_relay.worker.handler import Handler, Unusable, load
from outbox_relay.worker.runner import Bounds, Runner


def main() -> None:
    """Serve the relay ``sys.argv[2]`` over the descriptor ``sys.argv[1]`` until one of both ends."""
    pipe, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    watched = os.dup(pipe.fileno())
    guards.keep_pipe(pipe.fileno(), watched)
    guards.ignore_signals()
    guards.end_with(parent, watched)
    guards.die_first()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        task = _read_task(pipe)
        handler = load(task["handler"])
        transactions = _transactions(task)
    except Unusable as error:
        pipe.sendall(frame("unusable", [item(str(error))]))
        os._exit(0)
    sys.argv[1:] = []
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.create_task(_serve(pipe, handler, transactions, task))  # noqa: RUF006 - it is done at once
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # of a task that a handler has started
            continue
        except BaseException:  # such as a handler that closed the descriptors of the loop
            guards.end()


async def _serve(pipe: socket.socket, handler: Handler, transactions: Any, task: dict[str, Any]) -> None:
    bounds = Bounds(task["threads"], task["share"], task["patience"])
    runner = Runner(handler, transactions, bounds, task["replay"])
    channel = Channel(runner.receive, guards.end, FrameReader())
    runner.answer_to(channel)
    pipe.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=pipe)
    channel.send("ready", item(handler.is_async))


def _transactions(task: dict[str, Any]) -> Any:
    if not task["dsn"]:
        return None
    from outbox_relay.worker.transactions import Transactions  # psycopg is for those who need it

    return Transactions(task.pop("dsn"), task["consumer"])


def _read_task(pipe: socket.socket) -> dict[str, Any]:
    """Return the task, which is the first frame."""
    pipe.setblocking(True)
    lengths = _read(pipe, LENGTHS.size)
    [found] = FrameReader().feed(lengths + _read(pipe, min(MOST_HEAD, sum(LENGTHS.unpack(lengths)))))
    return _task(found)


def _read(pipe: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = pipe.recv(size - len(data))
        if not piece:
            guards.end()
        data += piece
    return data


def _task(found: Frame) -> dict[str, Any]:
    """Return the task of a frame. Raises ``Unusable`` if another version was installed since the relay was started."""
    if found.kind != "start" or len(found.items) != 1:
        guards.end()
    if (version := found.items[0].get("version")) != __version__:
        raise Unusable(f"the relay has version {version}, and {__version__} is installed: restart the relay")
    return found.items[0]
