"""Measure how fast dead letters are retried, and what that does to the latency of new events.

usage: python -m tests.bench.retry_dead [--sink webhook|kafka] [--dead 100000] [--rate 100] [--retry-rate N]
                                        [--seconds 15] [--rounds 3]

One relay process delivers to one webhook or one topic, which gets `--rate` new events per second. Each round measures
`--seconds` without a retry, then retries `--dead` dead letters with the command `dead retry`, and measures until the
last of them has been delivered. Latency is measured from before the emit to the arrival at the receiver or consumer.
The exit code is 1 if the median round takes 60 s or more, or if its 99th percentile is above 1.5 times that without a
retry.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psycopg

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.bench import consumer
from outbox_relay.workbench.bench.counter import Counter
from tests.bench import stream
from tests.bench.isolation import WARM_SECONDS, Emitter, config, latencies, p99
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.receiver.process import ReceiverProcess
from tests.support.service import RelayService
from tests.support.wait import until

MOST_SECONDS, MOST_RATIO = 60.0, 1.5
TOPIC = "retried"
DEAD = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, attempts, last_error, last_status, uid, type, key,
                             payload, content_type, created_at)
select s.name, 9000000000 + g, g % 64, 'dead', true, now(), 30, 'answered 503', 503, gen_random_uuid(), 'bench.event',
       'dead-' || g, '[]', 'application/json', now()
  from outbox.sink s, generate_series(1, {}) g
"""
LEFT = "select exists (select from outbox.delivery where id > 9000000000)"


class Mark(NamedTuple):
    """A moment: its time, and the number of new events emitted before it."""

    seconds: float
    events: int


class Destination(Protocol):
    """A destination that notes when new events arrive. `config` is that of a relay."""

    config: str

    def stop(self) -> None:
        """Take no more."""

    def latencies(self, first: Mark, last: Mark) -> list[float]:
        """Return those of the new events between two moments, in seconds. It has been stopped."""
        ...


class Webhook:
    """A receiver in a process of its own."""

    def __init__(self, receiver: ReceiverProcess, dsn: str) -> None:
        self._receiver = receiver
        self.config = config(dsn, [f"{receiver.url}/s0"])

    def stop(self) -> None:
        """Do nothing: the log of the receiver can be read at any time."""

    def latencies(self, first: Mark, last: Mark) -> list[float]:
        """Return those of the requests with new events."""
        arrivals = [arrival for arrival in self._receiver.arrivals() if arrival.payload != b"[]"]
        return latencies(arrivals, first.seconds, last.seconds, set())


class Topic:
    """A topic, and its consumer in a process of its own. New events arrive in the order of their emits, nearly."""

    def __init__(self, kafka: KafkaBroker, dsn: str, directory: Path) -> None:
        kafka.create_topic(TOPIC, partitions=stream.PARTITIONS)
        self.config = stream.CONFIG.format(dsn=dsn, topic=TOPIC, bootstrap=kafka.bootstrap)
        self._times = directory / "times"
        path = directory / "counter"
        counter = Counter(path)
        command = [sys.executable, "-m", "outbox_relay.workbench.bench.consumer", "--bootstrap", kafka.bootstrap]
        command += ["--topic", TOPIC, "--counter", str(path), "--times", str(self._times), "--fetch-wait-ms", "1"]
        self._process = subprocess.Popen(command)
        until(lambda: counter.read(consumer.ASSIGNED) > 0, seconds=60, what="the consumer reads")

    def stop(self) -> None:
        """End the consumer, which then writes down what it has measured."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def latencies(self, first: Mark, last: Mark) -> list[float]:
        """Return those of the records with new events."""
        return consumer.read_times(self._times)[first.events : last.events]


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
    """A database with a relay, and a steady load."""

    def __init__(self, dsn: str, connection: psycopg.Connection[Any], emitter: Emitter) -> None:
        self._dsn = dsn
        self._connection = connection
        self._emitter = emitter

    def _mark(self) -> Mark:
        return Mark(time.monotonic(), len(self._emitter.uids))

    def measure(self, dead: int, quiet_seconds: float, retry_rate: float | None) -> tuple[Mark, Mark, float, Mark]:
        """Return the moments before and after a time without a retry, the end of the command, and the end."""
        self._connection.execute(DEAD.format(dead).encode())
        self._connection.execute("vacuum analyze outbox.delivery")
        time.sleep(WARM_SECONDS)
        quiet = self._mark()
        time.sleep(quiet_seconds)
        began = self._mark()
        command = [
            sys.executable,
            "-m",
            "outbox_relay",
            "dead",
            "retry",
            "--type",
            "bench.event",
            "--yes",
            "--dsn",
            self._dsn,
        ]
        command += [] if retry_rate is None else ["--rate", f"{retry_rate:g}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        commanded = time.monotonic()
        until(lambda: self._connection.execute(LEFT).fetchone() == (False,), seconds=600, what="all are delivered")
        ended = self._mark()
        time.sleep(1)
        return quiet, began, commanded, ended


@contextmanager
def destination_of(sink: str, dsn: str, directory: Path) -> Generator[Destination]:
    """Provide a receiver of webhooks, or a topic of a broker."""
    if sink == "kafka":
        with KafkaBroker() as kafka:
            yield Topic(kafka, dsn, directory)
    else:
        with ReceiverProcess(directory) as receiver:
            yield Webhook(receiver, dsn)


def report(rounds: Sequence[Round]) -> int:
    """Print the medians, and return the exit code."""
    seconds = statistics.median(each.seconds for each in rounds)
    ratio = statistics.median(each.busy_p99 / each.quiet_p99 for each in rounds)
    print(f"median of {len(rounds)} rounds: {seconds:.1f} s, p99 {ratio:.2f} times that without a retry")
    return int(seconds >= MOST_SECONDS or ratio > MOST_RATIO)


def main(argv: list[str]) -> int:
    """Run the rounds and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.retry_dead")
    parser.add_argument("--sink", choices=("webhook", "kafka"), default="webhook")
    parser.add_argument("--dead", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=100.0, help="new events per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration without a retry, in each round")
    parser.add_argument("--retry-rate", type=float, help="the option --rate of dead retry; default: none")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(argv)
    with PostgresServer() as server, tempfile.TemporaryDirectory() as directory:
        server.create_database("retry")
        dsn = server.dsn("retry")
        migrate(dsn)
        with (
            destination_of(given.sink, dsn, Path(directory)) as destination,
            RelayService(Path(directory), destination.config),
            psycopg.connect(dsn, autocommit=True) as connection,
            Emitter(dsn, given.rate, time.time if given.sink == "kafka" else time.monotonic) as emitter,
        ):
            bench = Bench(dsn, connection, emitter)
            found = [bench.measure(given.dead, given.seconds, given.retry_rate) for _ in range(given.rounds)]
            destination.stop()
            rounds = [
                Round(
                    commanded - began.seconds,
                    ended.seconds - began.seconds,
                    p99(destination.latencies(quiet, began)),
                    p99(destination.latencies(began, ended)),
                )
                for quiet, began, commanded, ended in found
            ]
    for number, each in enumerate(rounds, 1):
        print(f"round {number}: {given.dead} {each}")
    return report(rounds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
