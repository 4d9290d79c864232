"""Measure the cost of metrics: relays with metrics, scraped every second, and relays without them take turns.

usage: python -m tests.bench.metrics [--events 500000] [--rounds 5]

Each drains a backlog to a topic of a real Kafka, in a database of its own. Events are counted in the topic, from the
first to the last. The processor time includes the start of the relay. The rate depends on everything else that the
machine does, so compare the processor time first. The last lines have medians and the cost of metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.bench.database import BenchDatabase
from tests.bench.attempts import CONFIG, SERVER, UNSETTLED
from tests.bench.stream import PARTITIONS, EndOffsets
from tests.support.kafka import KafkaBroker
from tests.support.metrics import OPENMETRICS, scrape
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

PROGRAMS = {"off": ("tests.bench.unmeasured",), "on": ("outbox_relay",)}
SCRAPE_SECONDS = 1.0


class Scraper:
    """Scrapes a relay every second in a thread, and times the answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._end.wait(SCRAPE_SECONDS):
            began = time.monotonic()
            scrape(self._port, OPENMETRICS)
            self.seconds.append(time.monotonic() - began)


def drain(server: PostgresServer, broker: KafkaBroker, mode: str, name: str, events: int) -> dict[str, float]:
    """Drain a backlog with one relay, and return its rate and its processor time."""
    server.create_database(name)
    dsn = server.dsn(name)
    migrate(dsn)
    broker.create_topic(name, PARTITIONS)
    ends = EndOffsets(broker.bootstrap, name)
    with BenchDatabase(dsn) as database, tempfile.TemporaryDirectory() as directory:
        database.fill(events, lambda: None)
        database.settle()
        config = CONFIG.format(dsn=dsn, name=name, mode="failures", bootstrap=broker.bootstrap)
        with RelayService(Path(directory), config, name, program=PROGRAMS[mode]) as relay:
            scraper = Scraper(relay.port)
            with scraper if mode == "on" else nullcontext():
                seconds = ends.seconds(events)
            until(lambda: database.value(UNSETTLED) is None, seconds=60, what="every event is settled")
            stat = Path(f"/proc/{relay.process.pid}/stat").read_text().rpartition(")")[2].split()
        return {
            "events/s": events / seconds,
            "relay, us/event": (int(stat[11]) + int(stat[12])) * 1e6 / os.sysconf("SC_CLK_TCK") / events,
            "scrapes": len(scraper.seconds),
            "slowest scrape, ms": 1000 * max(scraper.seconds, default=0.0),
            "load": os.getloadavg()[0],
        }


def rounds(events: int, count: int) -> Iterator[dict[str, object]]:
    """Yield the figures of each run, then medians, and the cost of metrics as a share."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in PROGRAMS}
    with PostgresServer(SERVER) as server, KafkaBroker() as broker:
        for number in range(count):
            for mode in sorted(PROGRAMS, reverse=number % 2 == 0):
                figures = drain(server, broker, mode, f"{mode}_{number}", events)
                found[mode].append(figures)
                yield {"metrics": mode, **_rounded(figures)}
    medians = {
        mode: {name: statistics.median(each[name] for each in runs) for name in runs[0]} for mode, runs in found.items()
    }
    yield from ({"median of": mode, **_rounded(figures)} for mode, figures in medians.items())
    yield {
        f"{name}, cost in %": round(100 * sign * (medians["on"][name] / medians["off"][name] - 1), 2)
        for name, sign in (("events/s", -1), ("relay, us/event", 1))
    }


def _rounded(figures: dict[str, float]) -> dict[str, object]:
    return {name: round(value, 2) for name, value in figures.items()}


def main(argv: list[str]) -> int:
    """Measure and print one JSON object per line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metrics")
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    for found in rounds(arguments.events, arguments.rounds):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
