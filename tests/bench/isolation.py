"""Measure how sinks that hang or are down affect the latency of other sinks in one relay process.

usage: python -m tests.bench.isolation [--sinks 20] [--rate 50] [--seconds 15] [--pairs 5] [--dead-seconds 300]

Every event goes to every sink. Latency is measured from before the emit to the arrival at the receiver. First come
pairs of runs, one without and one with a sink whose receiver never answers. In a last run two receivers are down for
`--dead-seconds` and then return: all committed events must arrive at all sinks.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import psycopg

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.postgres import PostgresServer
from tests.support.receiver import Receiver
from tests.support.receiver.faults import hang
from tests.support.receiver.process import Arrival, ReceiverProcess
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService
from tests.support.wait import until

KEYS = 1_000
WARM_SECONDS = 3.0
SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = 5
[sinks.{name}.circuit]
probe_max_seconds = 5
"""


class Emitter:
    """A thread that emits one event per transaction at a steady rate; the payload begins with the time."""

    def __init__(self, dsn: str, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._dsn = dsn
        self._rate = rate
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.uids: list[str] = []

    def _run(self) -> None:
        rng = random.Random(1)
        with psycopg.connect(self._dsn) as connection:
            due = time.monotonic()
            while not self._ended.wait(max(0.0, due - time.monotonic())):
                due += 1 / self._rate
                with connection.transaction():
                    payload = json.dumps({"at": self._clock(), "n": len(self.uids)}).encode()
                    uid = outbox.emit(
                        connection,
                        "bench.event",
                        payload,
                        key=f"k{rng.randrange(KEYS)}",
                        content_type="application/json",
                    )
                self.uids.append(str(uid))

    def __enter__(self) -> Emitter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)


def config(dsn: str, urls: Sequence[str]) -> str:
    """Return a configuration with a sink for each URL; every event goes to all of them."""
    names = [f"s{n}" for n in range(len(urls))]
    sinks = "".join(SINK.format(name=name, url=url, secret=SECRET) for name, url in zip(names, urls, strict=True))
    return f'[database]\ndsn = "{dsn}"\n{sinks}\n[routes]\n"*" = {json.dumps(names)}\n'


def latencies(arrivals: Iterable[Arrival], begin: float, end: float, without: set[str]) -> list[float]:
    """Return the latencies of events emitted between `begin` and `end`, except at the sinks `without`."""
    found: list[float] = []
    for arrival in arrivals:
        at = json.loads(arrival.payload)["at"]
        if begin <= at <= end and arrival.target not in without:
            found.append(arrival.seconds - at)
    return found


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return sorted(values)[int(len(values) * 0.99)] * 1000


class IsolationBench:
    """A server with a new database for each run."""

    def __init__(self, postgres: PostgresServer, options: argparse.Namespace) -> None:
        self._postgres = postgres
        self._options = options

    def _database(self) -> str:
        name = f"bench_{uuid4().hex}"
        self._postgres.create_database(name)
        migrate(self._postgres.dsn(name))
        return self._postgres.dsn(name)

    def hung(self, *, hung: bool) -> tuple[float, int]:
        """Return the p99 in milliseconds and the deliveries of all sinks but the first, which may hang."""
        options = self._options
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            receiver = stack.enter_context(ReceiverProcess(directory))
            silent = stack.enter_context(Receiver(hang))
            urls = [f"{receiver.url}/s{n}" for n in range(options.sinks)]
            if hung:
                urls[0] = silent.url
            dsn = self._database()
            relay = stack.enter_context(RelayService(directory, config(dsn, urls)))
            with Emitter(dsn, options.rate):
                time.sleep(WARM_SECONDS)
                begin = time.monotonic()
                time.sleep(options.seconds)
                end = time.monotonic()
                time.sleep(1)
            relay.kill()
            time.sleep(0.1)
            found = latencies(receiver.arrivals(), begin, end, {"/hooks/s0"})
            return p99(found), len(found)

    def dead(self) -> None:
        """Stop two receivers for a while and print the result for all events."""
        options = self._options
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            healthy = stack.enter_context(ReceiverProcess(directory, name="healthy"))
            late = ReceiverProcess(directory, name="late")
            urls = [f"{late.url if n < 2 else healthy.url}/s{n}" for n in range(options.sinks)]
            dsn = self._database()
            stack.enter_context(RelayService(directory, config(dsn, urls)))
            with Emitter(dsn, options.rate) as emitter:
                time.sleep(WARM_SECONDS)
                begin = time.monotonic()
                time.sleep(options.dead_seconds)
                end = time.monotonic()
                stack.enter_context(late)
                back = time.monotonic()
                time.sleep(WARM_SECONDS)
            wanted = {(f"/hooks/s{n}", uid) for n in range(options.sinks) for uid in emitter.uids}
            until(lambda: len(_pairs(healthy, late)) >= len(wanted), seconds=600, what="all events have arrived")
            caught_up = max(arrival.seconds for arrival in late.arrivals()) - back
            arrivals = [*healthy.arrivals(), *late.arrivals()]
            found = latencies(arrivals, begin, end, {"/hooks/s0", "/hooks/s1"})
            came = _pairs(healthy, late)
            print(
                f"{options.sinks} sinks, two dead for {options.dead_seconds:g} s: {len(emitter.uids)} events,"
                f" lost {len(wanted - came)}, made up {len(came - wanted)},"
                f" duplicates {len(arrivals) - len(came)}; healthy ones p50 {statistics.median(found) * 1000:.1f} ms,"
                f" p99 {p99(found):.1f} ms; the two had caught up {caught_up:.1f} s after they came back",
                flush=True,
            )


def _pairs(*receivers: ReceiverProcess) -> set[tuple[str, str]]:
    return {(arrival.target, arrival.uid) for receiver in receivers for arrival in receiver.arrivals()}


def main() -> None:
    """Run the pairs and the outage, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sinks", type=int, default=20)
    parser.add_argument("--rate", type=float, default=50.0, help="events per second, each to every sink")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each run of a pair")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dead-seconds", type=float, default=300.0, help="0: skip this part")
    options = parser.parse_args()
    with PostgresServer() as postgres:
        bench = IsolationBench(postgres, options)
        differences: list[tuple[float, float]] = []
        for pair in range(options.pairs):
            sides = [False, True] if pair % 2 == 0 else [True, False]
            measured = {hung: bench.hung(hung=hung) for hung in sides}
            (calm, _), (beside, count) = measured[False], measured[True]
            differences.append((beside - calm, (beside - calm) / calm))
            print(
                f"pair {pair + 1}: {count} deliveries, p99 of the others {calm:.1f} ms,"
                f" beside a hung sink {beside:.1f} ms",
                flush=True,
            )
        if differences:
            milliseconds, part = (statistics.median(column) for column in zip(*differences, strict=True))
            print(
                f"median of {options.pairs} pairs, {options.sinks} sinks at"
                f" {options.rate * options.sinks:g} deliveries/s: {milliseconds:+.1f} ms, {part:+.0%}",
                flush=True,
            )
        if options.dead_seconds:
            bench.dead()


if __name__ == "__main__":
    main()
