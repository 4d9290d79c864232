"""Measure the cost of traces at emit: applications without OpenTelemetry, with its API alone and with a tracer.

usage: python -m tests.bench.emit_traces [--events 2000] [--rounds 9]

The modes take turns on one connection. `none` leaves out even the look for a tracer, so that the others can be compared
with emitting as it would be without traces. The look itself is measured without a database too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import timeit
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import psycopg
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from outbox_relay import emit_spans, outbox
from outbox_relay.emit_spans import Row
from outbox_relay.postgres.migrations import migrate
from tests.support.postgres import PostgresServer

MODES = ("none", "not imported", "api", "sdk")
LOOK = "opentelemetry.trace"
ROW: Row = ("order.created", b'{"id":1}', "order-1", None, None, None, "application/json", None, None, None)
CALLS = 20_000


def _same(provider: trace.TracerProvider) -> trace.TracerProvider:
    return provider


def begin_nothing(_: Sequence[Row]) -> None:
    """Do nothing in place of `emit_spans.begin`."""


@contextmanager
def application(mode: str) -> Generator[None]:
    """Be an application of this kind."""
    provider = TracerProvider(shutdown_on_exit=False) if mode == "sdk" else trace.ProxyTracerProvider()
    modules = {} if mode in ("api", "sdk") else {LOOK: None}
    with (
        mock.patch.object(trace, "get_tracer_provider", partial(_same, provider)),
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(emit_spans, "begin", begin_nothing if mode == "none" else emit_spans.begin),
    ):
        yield


def emit_seconds(connection: psycopg.Connection[Any], events: int) -> float:
    """Emit events one by one in a transaction that is rolled back, and return the seconds for each."""
    began = time.perf_counter()
    for number in range(events):
        outbox.emit(connection, "order.created", {"id": number}, key=f"order-{number}")
    seconds = time.perf_counter() - began
    connection.rollback()
    return seconds / events


def look_seconds() -> float:
    """Return the seconds of one look for a tracer, with the spans if there is one."""
    return min(timeit.repeat(lambda: emit_spans.begin((ROW,)), number=CALLS, repeat=3)) / CALLS


def measure(dsn: str, events: int, rounds: int) -> dict[str, Any]:
    """Let the modes take turns, and return the median of each in microseconds and compared with `none`."""
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with psycopg.connect(dsn) as connection:
        emit_seconds(connection, events)
        for _ in range(rounds):
            for mode, seconds in found.items():
                with application(mode):
                    seconds.append(emit_seconds(connection, events))
    ratios = {
        mode: [s / none for s, none in zip(seconds, found["none"], strict=True)] for mode, seconds in found.items()
    }
    return {
        mode: {
            "emit_us": round(statistics.median(seconds) * 1e6, 1),
            "ratio": round(statistics.median(ratios[mode]), 4),
            "look_us": round(_look(mode) * 1e6, 3),
        }
        for mode, seconds in found.items()
    }


def _look(mode: str) -> float:
    with application(mode):
        return look_seconds()


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2000, help="events of one turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each mode")
    arguments = parser.parse_args()
    with PostgresServer() as server:
        server.create_database("traces")
        migrate(server.dsn("traces"))
        print(json.dumps(measure(server.dsn("traces"), arguments.events, arguments.rounds), indent=2))


if __name__ == "__main__":
    main()
