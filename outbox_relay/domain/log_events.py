"""The events of the log: every line of the service has one of these names, in the field ``event``.

The names are stable: a rule that looks for one finds it in later releases. The messages are for people and may change.
docs/observability.md lists all of them, and a test compares it with this table and with the calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from structlog.stdlib import BoundLogger

KAFKA_CLIENT: Final = "kafka.client"
LIBRARY: Final = "library"
INTERVAL_SECONDS = 10.0
"""Least time between two lines of one event that recurs, for example while the database is away."""
SUBJECTS = ("sink", "part", "chore", "schedule", "group", "replay", "cause")
"""The values that tell lines of one event apart. The cause is the stable label of an error, not its text."""
MOST_LINES = 1_000
"""Number of lines that are counted apart. Further ones are limited by their event alone."""

LOG_EVENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # The process
        "relay.started": "started",
        "relay.listening": "listening",
        "relay.stopping": "stopping",
        "relay.stopping_at_once": "stopping at once",
        "relay.stop_incomplete": "stopped before everything in hand was settled",
        "relay.left_behind": "left behind until its lease ends",
        "relay.stopped": "stopped",
        "relay.failed": "the relay cannot run",
        "relay.crashed": "the relay ended after an unexpected error",
        "relay.gave_up": "giving up",
        "part.restarted": "part restarted after an error",
        "log.dropped": "lines were dropped because stderr was not read",
        "http.accept_failed": "no connection can be accepted by the listener",
        # Configuration
        "config.warning": "configuration warning",
        "config.reloaded": "configuration reloaded",
        "config.reload_pending": "the configuration is not reloaded yet",
        "config.waits": "the sink starts no other event until its requests in flight end",
        "config.reload_refused": "the configuration was not reloaded; nothing has changed",
        "config.restart_needed": "some settings of the file take effect when this relay is restarted",
        "config.not_recorded": "the settings are not recorded",
        "config.superseded": "another configuration of this sink is in force; draining",
        # Metrics
        "figures.failed": "figures of the database are unknown",
        # Database
        "database.unreachable": "the database cannot be reached yet",
        "database.tick_failed": "a tick failed",
        "database.other_listened": (
            "database.listen_dsn leads to another server or database than database.dsn: the relay polls until it is "
            "corrected"
        ),
        # Sinks
        "database.not_listening": "no connection to listen on; the log is polled",
        "sink.restarted": "session of a sink restarted after an error",
        "sink.reloaded": "sink served with new settings",
        "sink.not_reported": "the state of the sink is not in the database yet",
        "sink.paused": "sink paused until it is resumed",
        "sink.lagging": "sink lags",
        "sink.recovered": "sink no longer lags",
        "sink.throttled": "destination throttles",
        "sink.unthrottled": "limit of requests restored",
        "sink.trouble": "parts of the destination in trouble",
        "sink.trouble_over": "parts of the destination recovered",
        "sink.missing": "this sink is not in the database and is not served",
        "sink.registered_again": (
            "this sink is new in the restored database and was registered again; if it starts now, events emitted "
            "before are not delivered to it: deliver them with outbox-relay replay start"
        ),
        "circuit.opened": "circuit opened",
        "circuit.closed": "circuit closed",
        KAFKA_CLIENT: "a line of Kafka's client, which is the message",
        # Deliveries
        "event.dead": "event became a dead letter",
        "rows.claim_failed": "claim of rows failed",
        "rows.lost": "leases of rows were lost before they were settled",
        "attempts.dropped": "attempts are not recorded",
        "attempts.recorded": "attempts are recorded again",
        # Shards
        "shards.claimed": "shards claimed",
        "shards.released": "shards released",
        "shards.lost": "shards lost",
        "leases.failed": "a round of leases failed; the relay tries again",
        # Replays
        "replay.serving": "serving a replay",
        "replay.unserved": "a replay cannot be delivered here",
        "replay.failed": "a replay failed and is tried again",
        "replays.failed": "replays could not be read; the relay tries again",
        # Housekeeping and retention
        "housekeeping.failed": "a chore failed and is tried again",
        "retention.emptied": "day emptied",
        "retention.dropped": "partition removed",
        "retention.blocked": "retention blocked",
        "retention.archive_failed": "archive failed",
        "retention.left": "a day past keep_days was not emptied twice in a row",
        "retention.clock_jumped": "retention waits: the clock has jumped, or no relay ran for a day",
        "retention.failed": "a retention pass failed; the relay tries again",
        # Schedules
        "schedule.emitted": "event of a schedule emitted",
        "schedule.passed_over": "missed times of a schedule passed over",
        "schedule.refused": "the schema refused the event of a schedule; outbox-relay schedules list shows the reason",
        "schedule.failed": "a schedule cannot fire here",
        "schedules.superseded": "schedules of the file have another definition",
        "schedules.registered_again": "schedules were missing in the restored database and were registered again",
        "schedules.taken_back": "definitions of the file are in force again",
        # Traces
        "traces.recording": "recording traces",
        "traces.not_recorded": "traces are not recorded",
        # The page
        "ui.access_failed": "users cannot be read",
        "ui.failed": "request failed",
        "ui.too_many_failures": "too many wrong passwords or tokens",
        "ui.readable_secrets": "every user of this machine may read a file with secrets",
        LIBRARY: "a line of a library, which is the message",
    }
)
"""The events by name, with their messages."""


class RateLimitedLog:
    """A log that writes a recurring warning at most every ``seconds``.

    The next line counts those left out in between.
    """

    def __init__(self, log: BoundLogger, seconds: float = INTERVAL_SECONDS) -> None:
        self._log = log
        self._seconds = seconds
        self._written: dict[tuple[object, ...], tuple[float, int]] = {}

    def warning(self, event: str, /, **values: Any) -> None:
        """Write a line, or count it if one with the same ``event`` and subject is recent.

        A second cause is written at once, even if a line of the first one is recent.
        """
        line = self._line(event, values)
        now = time.monotonic()
        written_at, left_out = self._written.get(line, (float("-inf"), 0))
        if now - written_at < self._seconds:
            self._written[line] = (written_at, left_out + 1)
            return
        self._written[line] = (now, 0)
        more = {"left_out": left_out} if left_out else {}
        self._log.warning(event, **values, **more)

    def _line(self, event: str, values: Mapping[str, Any]) -> tuple[object, ...]:
        line = (event, *(values.get(name) for name in SUBJECTS))
        return line if line in self._written or len(self._written) < MOST_LINES else (event,)
