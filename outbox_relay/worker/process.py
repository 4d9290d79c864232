"""The main function of a worker process: it takes its task from the relay, imports the handler, and serves calls."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import LENGTHS, MOST_HEAD, Frame, FrameReader, encode
from outbox_relay.worker.handler import Handler, Unusable, load
from outbox_relay.worker.runner import Runner

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the relay ``sys.argv[2]`` over the descriptor ``sys.argv[1]`` until one of both ends."""
    pipe, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _end_with(parent, pipe)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        task = _read_task(pipe)
        handler = load(task["handler"])
        transactions = _transactions(task)
    except Unusable as error:
        pipe.sendall(encode("unusable", str(error)))
        os._exit(0)
    sys.argv[1:] = []
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.create_task(_serve(pipe, handler, transactions, task["threads"]))  # noqa: RUF006 - it is done at once
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # of a task that a handler has started
            continue
        except BaseException:  # such as a handler that closed the descriptors of the loop
            _exit()


async def _serve(pipe: socket.socket, handler: Handler, transactions: Any, threads: int) -> None:
    runner = Runner(handler, transactions, threads)
    channel = Channel(runner.receive, _exit, FrameReader())
    runner.answer_to(channel)
    pipe.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=pipe)
    channel.send(encode("ready", "async" if handler.is_async else "plain"))


def _transactions(task: dict[str, Any]) -> Any:
    if not task["dsn"]:
        return None
    from outbox_relay.worker.transactions import Transactions  # psycopg is for those who need it

    return Transactions(task.pop("dsn"), task["consumer"])


def _read_task(pipe: socket.socket) -> dict[str, Any]:
    """Return the task, which is the first frame."""
    pipe.setblocking(True)
    lengths = _read(pipe, LENGTHS.size)
    [frame] = FrameReader().feed(lengths + _read(pipe, min(MOST_HEAD, sum(LENGTHS.unpack(lengths)))))
    return _task(frame)


def _read(pipe: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = pipe.recv(size - len(data))
        if not piece:
            _exit()
        data += piece
    return data


def _task(frame: Frame) -> dict[str, Any]:
    if frame.kind != "start" or len(frame.values) != 1:
        _exit()
    return frame.values[0]


def _end_with(parent: int, pipe: socket.socket) -> None:
    """End this process when the relay ends, whatever a handler does.

    The kernel does it on Linux. A thread does it too, with the processes that handlers have started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _exit()
    threading.Thread(target=_wait_for_end, args=(os.dup(pipe.fileno()),), daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    poll = select.poll()
    poll.register(pipe, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    _exit()


def _exit() -> None:
    """End this process and those that its handlers have started."""
    with suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)
