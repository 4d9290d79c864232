"""Measure how fast dead letters are retried, and what that does to the latency of new events.

usage: python -m tests.bench.retry_dead [--dead 100000] [--rate 100] [--retry-rate N] [--seconds 15] [--rounds 3]

One relay process delivers to one webhook, which gets `--rate` new events per second. Each round measures `--seconds`
without a retry, then retries `--dead` dead letters with the command `dead retry`, and measures until the last of them
has been delivered. Latency is measured from before the emit to the arrival at the receiver. The exit code is 1 if the
median round takes 60 s or more, or if its 99th percentile is above 1.5 times that without a retry.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from outbox_relay.postgres.migrations import migrate
from tests.bench.isolation import WARM_SECONDS, Emitter, config, latencies, p99
from tests.support.postgres import PostgresServer
from tests.support.receiver.process import ReceiverProcess
from tests.support.service import RelayService
from tests.support.wait import until

MOST_SECONDS, MOST_RATIO = 60.0, 1.5
DEAD = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, attempts, last_error, last_status, uid, type, key,
                             payload, content_type, created_at)
select 's0', 9000000000 + g, g % 64, 'dead', true, now(), 30, 'answered 503', 503, gen_random_uuid(), 'bench.event',
       'dead-' || g, convert_to('{{"at": 0}}', 'UTF8'), 'application/json', now()
  from generate_series(1, {}) g
"""
LEFT = "select exists (select from outbox.delivery where id > 9000000000)"


@dataclass(frozen=True)
class Round:
    """One round: seconds of the command and until the last delivery, and p99 in milliseconds without and with it."""

    command_seconds: float
    seconds: float
    quiet_p99: float
    busy_p99: float

    def __str__(self) -> str:
        """Return the figures as a phrase."""
        return (
            f"retried in {self.command_seconds:.1f} s and delivered in {self.seconds:.1f} s, p99 of new events "
            f"{self.busy_p99:.1f} ms, {self.quiet_p99:.1f} ms without a retry"
        )


class Bench:
    """A database, a receiver, a relay and a steady load."""

    def __init__(self, dsn: str, receiver: ReceiverProcess, connection: psycopg.Connection[Any]) -> None:
        self._dsn = dsn
        self._receiver = receiver
        self._connection = connection

    def measure(self, dead: int, quiet_seconds: float, retry_rate: float | None) -> Round:
        """Measure without a retry, then with one."""
        self._connection.execute(DEAD.format(dead).encode())
        self._connection.execute("vacuum analyze outbox.delivery")
        time.sleep(WARM_SECONDS)
        quiet = time.monotonic()
        time.sleep(quiet_seconds)
        began = time.monotonic()
        command = [sys.executable, "-m", "outbox_relay", "dead", "retry", "--sink", "s0", "--yes", "--dsn", self._dsn]
        command += [] if retry_rate is None else ["--rate", f"{retry_rate:g}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        commanded = time.monotonic()
        until(lambda: self._connection.execute(LEFT).fetchone() == (False,), seconds=600, what="all are delivered")
        ended = time.monotonic()
        time.sleep(1)
        arrivals = list(self._receiver.arrivals())
        return Round(
            commanded - began,
            ended - began,
            p99(latencies(arrivals, quiet, began, set())),
            p99(latencies(arrivals, began, ended, set())),
        )


def report(rounds: Sequence[Round]) -> int:
    """Print the medians, and return the exit code."""
    seconds = statistics.median(each.seconds for each in rounds)
    ratio = statistics.median(each.busy_p99 / each.quiet_p99 for each in rounds)
    print(f"median of {len(rounds)} rounds: {seconds:.1f} s, p99 {ratio:.2f} times that without a retry")
    return int(seconds >= MOST_SECONDS or ratio > MOST_RATIO)


def main(argv: list[str]) -> int:
    """Run the rounds and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.retry_dead")
    parser.add_argument("--dead", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=100.0, help="new events per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration without a retry, in each round")
    parser.add_argument("--retry-rate", type=float, help="the option --rate of dead retry; default: none")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    rounds: list[Round] = []
    with PostgresServer() as server, tempfile.TemporaryDirectory() as directory:
        server.create_database("retry")
        dsn = server.dsn("retry")
        migrate(dsn)
        with (
            ReceiverProcess(Path(directory)) as receiver,
            RelayService(Path(directory), config(dsn, [f"{receiver.url}/s0"])),
            psycopg.connect(dsn, autocommit=True) as connection,
            Emitter(dsn, given.rate),
        ):
            for number in range(1, given.rounds + 1):
                found = Bench(dsn, receiver, connection).measure(given.dead, given.seconds, given.retry_rate)
                rounds.append(found)
                print(f"round {number}: {given.dead} {found}", flush=True)
    return report(rounds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
