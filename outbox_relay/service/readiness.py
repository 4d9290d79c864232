"""The answer of ``/readyz``: whether the process does its work, and the state of every sink."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.service.relays import SinkRelays

SILENT_SECONDS = 10.0
"""Time without an answer of the database after which a relay is not ready."""


class Readiness:
    """Reports from memory. The database and the destinations are not asked.

    ``last_reload`` returns False after a reload that failed.
    """

    def __init__(self, relays: SinkRelays, last_reload: Callable[[], bool], stopping: asyncio.Event) -> None:
        self._relays = relays
        self._last_reload = last_reload
        self._stopping = stopping

    def report(self) -> tuple[bool, Mapping[str, object]]:
        """Return True if the process does its work, and the details for people."""
        silent = time.monotonic() - self._relays.answered_at
        shards = self._relays.shards
        sinks = {name: _sink(relay, shards[name]) for name, relay in self._relays.items()}
        serving = bool(sinks) and not any(sink["fault"] for sink in sinks.values())
        return serving and silent < SILENT_SECONDS and not self._stopping.is_set(), {
            "database_heard_seconds_ago": round(silent, 1) if sinks else None,
            "config_last_reload_successful": self._last_reload(),
            "sinks": sinks,
        }


def _sink(relay: SinkRelay, shards: int) -> dict[str, object]:
    return {
        "shards": shards,
        "in_hand": relay.in_hand,
        "in_flight_limit": relay.in_flight_limit,
        "circuit": relay.circuit,
        "fault": relay.fault,
        "restarts": dict(relay.restarts),
        "attempts_not_recorded": relay.recorder.dropped,
    }
