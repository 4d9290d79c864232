"""Measure the cost of recorded attempts: relays that record none, failures or all take turns on a backlog.

usage: python -m tests.bench.attempts [--events 300000] [--rounds 3]

Each drains a backlog to a topic of a real Kafka, in a database of its own. Events are counted in the topic, from the
first to the last. WAL and processor time include the settlement of the last events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.bench.database import BenchDatabase
from tests.bench.stream import PARTITIONS, EndOffsets
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

MODES = ("none", "failures", "all")
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{name}"
record_attempts = "{mode}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""
SERVER = {"autovacuum": "off", "shared_buffers": "512MB", "max_wal_size": "8GB"}
WAL = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
UNSETTLED = (
    "select 1 from outbox_internal.settled_upto('events') s "
    "where s.upto_id < (select last_value from outbox.event_id_seq)"
)


def drain(server: PostgresServer, broker: KafkaBroker, mode: str, name: str, events: int) -> dict[str, float]:
    """Drain a backlog with one relay, and return its rate and what it cost."""
    server.create_database(name)
    dsn = server.dsn(name)
    migrate(dsn)
    broker.create_topic(name, PARTITIONS)
    ends = EndOffsets(broker.bootstrap, name)
    with BenchDatabase(dsn) as database, tempfile.TemporaryDirectory() as directory:
        database.fill(events, lambda: None)
        database.settle()
        before = int(database.value(WAL))
        config = CONFIG.format(dsn=dsn, name=name, mode=mode, bootstrap=broker.bootstrap)
        with RelayService(Path(directory), config, name) as relay:
            seconds = ends.seconds(events)
            until(lambda: database.value(UNSETTLED) is None, seconds=60, what="every event is settled")
            stat = Path(f"/proc/{relay.process.pid}/stat").read_text().rpartition(")")[2].split()
        recorded = int(database.value("select count(*) from outbox.attempt"))
        assert recorded == (events if mode == "all" else 0), recorded
        size = int(database.value("select sum(pg_total_relation_size(i.inhrelid)) from pg_inherits i "
                                  "where i.inhparent = 'outbox.attempt'::regclass"))  # fmt: skip
        return {
            "events/s": events / seconds,
            "WAL, bytes/event": (int(database.value(WAL)) - before) / events,
            "relay, us/event": (int(stat[11]) + int(stat[12])) * 1e4 / events,
            "table, bytes/event": size / events,
        }


def rounds(events: int, count: int) -> Iterator[dict[str, object]]:
    """Yield the figures of each run, then medians and ratios to the relays that record nothing."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with PostgresServer(SERVER) as server, KafkaBroker() as broker:
        for number in range(count):
            for mode in MODES[number % 3 :] + MODES[: number % 3]:
                figures = drain(server, broker, mode, f"{mode}_{number}", events)
                found[mode].append(figures)
                yield {"record_attempts": mode, **_rounded(figures)}
    medians = {
        mode: {name: statistics.median(each[name] for each in runs) for name in runs[0]} for mode, runs in found.items()
    }
    for mode, figures in medians.items():
        ratio = figures["events/s"] / medians["none"]["events/s"]
        yield {"median of": mode, **_rounded(figures), "rate, ratio to none": round(ratio, 2)}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in figures.items()}


def main(argv: list[str]) -> int:
    """Measure and print one JSON object per line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attempts")
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    for found in rounds(arguments.events, arguments.rounds):
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
