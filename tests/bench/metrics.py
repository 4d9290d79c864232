"""Measure the cost of metrics within drains: slots with and without ten times the work for it take turns.

usage: python -m tests.bench.metrics [--of scrapes|records|figures] [--sinks 1] [--asked 12] [--drains 6]

A relay drains a backlog to a topic of a real Kafka as fast as it can. The next drain has a relay with new sinks. Slots
take 1.2 seconds. The work is ten `scrapes` a second of OpenMetrics, each rendered, where a scraper asks every 5 to 60
seconds; or `records`, the counts and durations of the process, kept ten times more; or `figures` of the database, a
round each second instead of every ten. The printed costs are a tenth of the differences between neighbouring slots: of
one scrape a second, of records and of figures as they are.

Prints the pairs of slots as JSON, one in a line, then estimates, each with an interval of 95 %. `--earlier FILE...`
adds pairs that earlier runs printed. With `--asked 1`, `/metrics` is asked once in a slot: the times of answers are
then those of usual scrapes, and costs are less exact. Ends with 1 if an answer took longer than 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.bench.database import BenchDatabase
from tests.bench.attempts import SERVER
from tests.bench.slots import Pair, Slot, answer_cost, processor_cost, rate_cost
from tests.bench.stream import PARTITIONS, EndOffsets
from tests.bench.toggled import TIMES
from tests.support.kafka import KafkaBroker
from tests.support.metrics import OPENMETRICS
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

SLOT_SECONDS = 1.2
MOST_MS = 50.0
"""Time within which each answer must be complete."""
PARTS = ("scrapes", "records", "figures")
NAME = "measured"
SINK = """[sinks.{sink}]
type = "kafka"
start = "beginning"
topic = "{topic}"
[sinks.{sink}.producer]
"bootstrap.servers" = "{bootstrap}"
"""


class Scraper:
    """Asks a relay for metrics as Prometheus does, and times the complete answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._request = f"GET /metrics HTTP/1.1\r\nhost: x\r\naccept: {OPENMETRICS}\r\n\r\n".encode()
        self._last = b""
        self.rendered = 0
        self.milliseconds: list[float] = []

    def ask(self) -> None:
        """Ask once, and count the answer if it is a new one."""
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as connection:
            connection.sendall(self._request)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        self.milliseconds.append(1000 * (time.perf_counter() - began))
        assert answer.startswith(b"HTTP/1.1 200"), answer[:80]
        self.rendered += answer != self._last
        self._last = answer


class Drain:
    """A relay with a backlog, and the counts of what it has done."""

    def __init__(self, ends: EndOffsets, relay: RelayService, part: str, asked: int) -> None:
        self._ends = ends
        self._relay = relay
        self._part = part
        self._asked = asked if part == "scrapes" else 0
        self._is_on = False
        self.scraper = Scraper(relay.port)

    def lines(self, upto: int) -> Iterator[dict[str, Any]]:
        """Yield the pairs of slots of a drain to ``upto`` records, and the time of each answer."""
        for pair in self._pairs(upto):
            yield pair._asdict()
        if self.scraper.milliseconds:
            yield {"milliseconds": self.scraper.milliseconds}

    def _pairs(self, upto: int) -> Iterator[Pair]:
        """Yield pairs of slots until the topic nearly has ``upto`` records, then wait for the rest."""
        before = self._ends.count()
        until(lambda: self._ends.count() > before, seconds=60, what="the drain begins")
        time.sleep(1.0)
        is_first_with, left = False, upto
        while left > 0:
            answers = self.scraper.rendered
            slots = {kind: self._slot(with_it=kind) for kind in (is_first_with, not is_first_with)}
            left = upto - self._ends.count()
            if left > 0:
                yield Pair(slots[False], slots[True], self.scraper.rendered - answers)
            left -= slots[False].deliveries + slots[True].deliveries
            is_first_with = not is_first_with
        until(lambda: self._ends.count() >= upto, seconds=60, what="every event is delivered")
        self._relay.stop()

    def _slot(self, *, with_it: bool) -> Slot:
        self._switch(with_it=with_it)
        began, deliveries, processor = time.perf_counter(), self._ends.count(), self._processor()
        for number in range(self._asked if with_it else 0):
            time.sleep(max(0.0, began + number * SLOT_SECONDS / self._asked - time.perf_counter()))
            self.scraper.ask()
        time.sleep(max(0.0, began + SLOT_SECONDS - time.perf_counter()))
        ended, after = time.perf_counter(), self._ends.count()
        return Slot(after - deliveries, ended - began, self._processor() - processor)

    def _switch(self, *, with_it: bool) -> None:
        if with_it != self._is_on:
            self._relay.send(signal.SIGUSR1)
            self._is_on = with_it

    def _processor(self) -> float:
        """Return the processor time of all threads of the relay in seconds."""
        threads = Path(f"/proc/{self._relay.process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def configuration(dsn: str, sinks: Sequence[str], bootstrap: str) -> str:
    """Return the settings of a relay whose sinks all deliver to the topic."""
    each = (SINK.format(sink=sink, topic=NAME, bootstrap=bootstrap) for sink in sinks)
    return f'[database]\ndsn = "{dsn}"\n{"".join(each)}[routes]\n"*" = {json.dumps(sinks)}\n'


def measure(part: str, sinks: int, asked: int, events: int, drains: int) -> Iterator[dict[str, Any]]:
    """Yield each pair, and the times of the answers."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer(SERVER))
        broker = stack.enter_context(KafkaBroker())
        server.create_database(NAME)
        dsn = server.dsn(NAME)
        migrate(dsn)
        broker.create_topic(NAME, PARTITIONS)
        ends = EndOffsets(broker.bootstrap, NAME)
        with BenchDatabase(dsn) as database:
            database.fill(events, lambda: None)
            database.settle()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(drains):
            names = [f"drain_{number}_{sink}" for sink in range(sinks)]
            config = configuration(dsn, names, broker.bootstrap)
            with RelayService(directory, config, f"{NAME}_{number}", program=("tests.bench.toggled", part)) as relay:
                yield from Drain(ends, relay, part, asked).lines((number + 1) * events * sinks)


def estimates(lines: Sequence[dict[str, Any]], times: float) -> dict[str, object]:
    """Return the estimates of all pairs, whose slots had the work ``times`` times, and the slowest answers."""
    found = [line for line in lines if "without" in line]
    pairs = [Pair(Slot(*pair["without"]), Slot(*pair["with_it"]), pair["answers"]) for pair in found]
    rates = sorted(pair.without.rate for pair in pairs)
    answered = sorted(milliseconds for line in lines for milliseconds in line.get("milliseconds", ()))
    processor = {"an answer, ms of processor": answer_cost(pairs).over(1)} if answered else {}
    return {
        "pairs": len(pairs),
        "deliveries/s without": round(rates[len(rates) // 2]),
        "less deliveries/s, %": rate_cost(pairs).over(times),
        "more processor time per delivery, %": processor_cost(pairs).over(times),
        **processor,
        "answers": len(answered),
        "median answer, ms": round(statistics.median(answered or [0.0]), 1),
        "slowest answers, ms": [round(each, 1) for each in answered[-5:]],
        "load": round(os.getloadavg()[0], 1),
    }


def main(argv: list[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metrics")
    parser.add_argument("--of", choices=PARTS, default="scrapes")
    parser.add_argument("--sinks", type=int, default=1)
    parser.add_argument("--asked", type=int, default=round(SLOT_SECONDS * TIMES))
    parser.add_argument("--events", type=int, default=1_500_000)
    parser.add_argument("--drains", type=int, default=6)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[])
    arguments = parser.parse_args(argv)
    lines = [json.loads(line) for path in arguments.earlier for line in path.read_text().splitlines()]
    part, asked = arguments.of, arguments.asked
    for found in measure(part, arguments.sinks, asked, arguments.events, arguments.drains):
        lines.append(found)
        print(json.dumps(found), flush=True)
    print(json.dumps(estimates(lines, asked / SLOT_SECONDS if part == "scrapes" else TIMES)), flush=True)
    return int(any(each > MOST_MS for line in lines for each in line.get("milliseconds", ())))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
