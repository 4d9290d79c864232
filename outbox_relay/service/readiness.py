"""The answers of ``/livez`` and ``/readyz``, from memory: the database and the destinations are not asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from outbox_relay.domain.times import lease_clock
from outbox_relay.relay.keeper import Keeper
from outbox_relay.service.reload import Reload
from outbox_relay.service.served_sinks import ServedSink

SILENT_SECONDS = 10.0
"""Time without an answer of the database after which a relay is not ready."""
STUCK_SECONDS, STUCK_LEASES = 60.0, 2
"""Time without a turn of the main thread, of the one that keeps the leases, or of the loop of a sink, after which the
process must end, plus this many times that of a lease. Every turn has a time limit, also if the database does not
answer. A stop has its own."""


class Readiness:
    """Reports whether the process lives, and whether it does its work."""

    def __init__(
        self,
        sinks: Mapping[str, ServedSink],
        keeper: Keeper,
        reload: Reload,
        stopping: threading.Event,
    ) -> None:
        self._sinks = sinks
        self._keeper = keeper
        self._reload = reload
        self._stopping = stopping
        self.turned_at = time.monotonic()
        """The ``time.monotonic()`` value of the last turn of the main thread."""

    def dead(self) -> str | None:
        """Return why the process must be restarted, or None."""
        if self._stopping.is_set():
            return None
        limit = STUCK_SECONDS + STUCK_LEASES * self._keeper.lease_seconds
        since = time.monotonic() - limit
        if self.turned_at < since:
            return "the main thread is stuck"
        if self._keeper.turned_at < since:
            return "the thread that keeps the leases is stuck"
        since = lease_clock() - limit
        stuck = [n for n, each in self._sinks.items() if each.leases.turned_at + each.sink.timeout_seconds < since]
        return f"the loop of sink {stuck[0]} is stuck" if stuck else None

    def report(self) -> tuple[bool, Mapping[str, object]]:
        """Return True if the process does its work, and the details for people."""
        silent = time.monotonic() - self._keeper.answered_at
        sinks = {name: _sink(sink) for name, sink in self._sinks.items()}
        serving = bool(sinks) and not any(sink["fault"] for sink in sinks.values())
        return serving and silent < SILENT_SECONDS and not self._stopping.is_set(), {
            "database_heard_seconds_ago": round(silent, 1) if sinks else None,
            "config_last_reload_successful": self._reload.last_successful,
            "sinks": sinks,
        }


def _sink(sink: ServedSink) -> dict[str, object]:
    return {
        "shards": len(sink.leases.held),
        "in_hand": sink.loop.in_hand,
        "in_flight_limit": sink.loop.in_flight_limit,
        "circuit": sink.loop.circuit,
        "fault": sink.loop.fault,
        "trouble": sink.sink.trouble,
        "restarts": dict(sink.restarts),
        "attempts_not_recorded": sink.loop.recorder.dropped,
    }
