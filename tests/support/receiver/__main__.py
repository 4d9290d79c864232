"""`python -m tests.support.receiver --port 20080 --log FILE` receives in a process of its own, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import base64
import signal
from pathlib import Path
from typing import TextIO

from tests.support.receiver.answers import Behaviour, after, chosen, say
from tests.support.receiver.fault_modes import FaultModes
from tests.support.receiver.request import Request
from tests.support.receiver.server import Receiver
from tests.support.receiver.signatures import SECRET

FLUSH_SECONDS = 0.05


def answering(log: TextIO, fault_modes: FaultModes | None, delay_seconds: float, receiver: Receiver) -> Behaviour:
    """Return a behaviour that writes a line for each request, before its answer, and keeps no request in memory."""

    def choose(request: Request) -> Behaviour:
        answer, behaviour = fault_modes.decide(request) if fault_modes else ("200", say(200))
        receiver.requests.clear()
        body = base64.b64encode(request.body).decode()
        log.write(
            f"{request.arrived:.6f}\t{request.target}\t{request.uid}\t{request.header('outbox-attempt')}\t{answer}"
            f"\t{request.problem or ''}\t{body}\n"
        )
        return after(delay_seconds, behaviour) if delay_seconds else behaviour

    return chosen(choose)


async def _flush(log: TextIO, ended: asyncio.Event) -> None:
    while not ended.is_set():
        log.flush()
        await asyncio.sleep(FLUSH_SECONDS)


def main() -> None:
    """Receive until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True, help="a line per request is appended here")
    parser.add_argument("--secret", action="append", help="verifies with these; without any, with the tests' own")
    parser.add_argument(
        "--fault-modes", action="store_true", help="fail, refuse, throttle and hang as fault_modes.py says"
    )
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    options = parser.parse_args()
    asyncio.run(_receive(options))


async def _receive(options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    with options.log.open("a") as log:
        receiver = Receiver(secrets=options.secret or (SECRET,), port=options.port)
        receiver.answer = answering(log, FaultModes() if options.fault_modes else None, options.delay, receiver)
        with receiver:
            await _flush(log, ended)


if __name__ == "__main__":
    main()
