"""Measure how long a relay takes from the start of its process to the delivery of a waiting event, and `status`.

usage: python -m tests.bench.start [--rounds 9]

Each round, on an embedded PostgreSQL: an event is emitted, `outbox-relay run` is started with one webhook sink, and the
time until the receiver has the event is taken. The relay is stopped, and `outbox-relay status` and an interpreter that
does nothing are timed, each as a process of its own. Prints the median of each, with minimum and maximum, in seconds.
Packages of the project's checks that structlog would import, if it found them, count as not installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, new_database
from tests.support.postgres import PostgresServer
from tests.support.receiver import Receiver
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import WEBHOOK

POLL_SECONDS = 0.002
MOST_SECONDS = 30.0
PROGRAM = """
import sys
sys.modules["rich"] = None
from outbox_relay.cli import main
sys.exit(main())
"""
COMMAND = [sys.executable, "-c", PROGRAM]


def timed(command: list[str]) -> float:
    """Return the duration of a process that must succeed, in seconds."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        limit = threading.Timer(MOST_SECONDS, process.kill)  # a wait with a limit sees the end up to 50 ms late
        limit.start()
        code = process.wait()
        found = time.perf_counter() - began
        limit.cancel()
    if code:
        raise subprocess.CalledProcessError(code, command)
    return found


def started(config: Path, database: Database, receiver: Receiver) -> float:
    """Return the time from the start of a relay to the arrival of an event that waits for it, in seconds."""
    with database.connect() as connection:
        connection.execute("select outbox.emit('a.created', '{}')")
    before = len(receiver.uids)
    began = time.perf_counter()
    with subprocess.Popen([*COMMAND, "run", "-c", str(config)], stderr=subprocess.DEVNULL) as relay:
        while len(receiver.uids) == before:
            if time.perf_counter() > began + MOST_SECONDS or relay.poll() is not None:
                relay.kill()
                raise RuntimeError("the relay delivered nothing")
            time.sleep(POLL_SECONDS)
        found = time.perf_counter() - began
        relay.terminate()
    return found


def measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the times of all rounds by what was measured. The first start, which registers the sink, is left out."""
    found: dict[str, list[float]] = {"start to delivery": [], "status": [], "python -c pass": []}
    with (
        PostgresServer() as server,
        new_database(server, "template1") as database,
        Receiver(secrets=[SECRET]) as receiver,
    ):
        migrate(database.dsn)
        (directory / "secrets").write_text(f"{SECRET}\n", encoding="ascii")
        config = directory / "relay.toml"
        text = WEBHOOK.format(dsn=database.dsn, url=receiver.url, directory=directory)
        config.write_text(text, encoding="utf-8")
        started(config, database, receiver)
        for _ in range(rounds):
            found["start to delivery"].append(started(config, database, receiver))
            found["status"].append(timed([*COMMAND, "status", "-c", str(config)]))
            found["python -c pass"].append(timed([sys.executable, "-c", "pass"]))
    return found


def main() -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds; default 9")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        found = measure(Path(directory), arguments.rounds)
    for name, times in found.items():
        figures = {"median": statistics.median(times), "least": min(times), "most": max(times)}
        print(json.dumps({"what": name, **{key: round(value, 3) for key, value in figures.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
