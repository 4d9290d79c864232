"""Measure what the parameters of version 21 cost an emit that uses none of them: tenant, priority and unique_key.

usage: python -m tests.bench.emit_parameters [--events 5000] [--rounds 15]

The call is that of before, on a database with version 20 of the schema and on one with the newest. Both are on one
server and take turns at running first. Transactions are rolled back. Target: a ratio of 1.02 at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from outbox_relay.postgres.migrations import migrate
from tests.support.postgres import PostgresServer
from tests.support.schemas import schema_up_to

BEFORE = 20
"""The last version of the schema whose ``emit`` has none of the parameters."""
EMIT = b"select outbox.emit('order.created', %s::jsonb, key => %s)"
EMIT_MANY = b"select outbox.emit('order.created', %s::jsonb, key => %s || n) from generate_series(1, 100) n"
CALLS = {"one a statement": (EMIT, 1), "100 a statement": (EMIT_MANY, 100)}
PAYLOAD = '{"order_id": 123456, "customer": "c-1234", "total": "12.34"}'


def emit_seconds(connection: psycopg.Connection[Any], call: str, events: int) -> float:
    """Emit events in a transaction that is rolled back, and return the seconds for each."""
    statement, size = CALLS[call]
    began = time.perf_counter()
    for number in range(-(-events // size)):
        connection.execute(statement, (PAYLOAD, f"order-{number}"), prepare=True)
    seconds = time.perf_counter() - began
    connection.rollback()
    return seconds / (size * -(-events // size))


def measure(dsns: dict[str, str], events: int, rounds: int) -> dict[str, Any]:
    """Let both versions take turns, and return the median of each in microseconds, and of their ratios."""
    found = {call: {version: list[float]() for version in dsns} for call in CALLS}
    with ExitStack() as stack:
        connections = {version: stack.enter_context(psycopg.connect(dsn)) for version, dsn in dsns.items()}
        for number in range(-1, rounds):  # the first round warms up
            versions = list(connections) if number % 2 else list(connections)[::-1]
            for call, seconds in found.items():
                for version in versions:
                    took = emit_seconds(connections[version], call, events)
                    seconds[version] += [took] if number >= 0 else []
    return {call: _summary(seconds) for call, seconds in found.items()}


def _summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    before, now = seconds.values()
    ratios = sorted(n / b for n, b in zip(now, before, strict=True))
    return {
        **{f"{version}, us": round(statistics.median(taken) * 1e6, 1) for version, taken in seconds.items()},
        "ratio": round(statistics.median(ratios), 4),
        "least": round(ratios[0], 4),
        "most": round(ratios[-1], 4),
        "ratio of the fastest": round(min(now) / min(before), 4),
    }


def main(argv: list[str]) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.emit_parameters")
    parser.add_argument("--events", type=int, default=5_000, help="events of one turn")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each version")
    arguments = parser.parse_args(argv)
    with PostgresServer() as server, tempfile.TemporaryDirectory() as directory:
        for name in ("before", "now"):
            server.create_database(name)
        dsns = {name: server.dsn(name) for name in ("before", "now")}
        migrate(dsns["before"], folder=schema_up_to(BEFORE, Path(directory) / "schema"))
        migrate(dsns["now"])
        print(json.dumps(measure(dsns, arguments.events, arguments.rounds), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
