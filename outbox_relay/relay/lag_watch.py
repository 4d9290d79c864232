"""Sinks that lag: their notices are made by the database, and this process logs each change."""

from __future__ import annotations

from structlog.stdlib import BoundLogger

from outbox_relay.postgres.store import Store

LOOK_SECONDS = 10.0
"""Interval at which the lag of sinks is looked at."""


class LagWatch:
    """Has notices made of sinks that lag by ``lagging_seconds``; None means that no sink receives notices."""

    def __init__(self, store: Store, lagging_seconds: float | None, log: BoundLogger) -> None:
        self._store = store
        self._lagging_seconds = lagging_seconds
        self._log = log
        self._lagging: frozenset[str] = frozenset()

    def use(self, lagging_seconds: float | None) -> None:
        """Use the setting of a reload."""
        self._lagging_seconds = lagging_seconds

    def look(self) -> None:
        """Look at all sinks once."""
        if (limit := self._lagging_seconds) is None:
            self._lagging = frozenset()
            return
        for sink, seconds, paused in self._store.notify_sinks(limit):
            if not paused:
                self._judge(sink, seconds, limit)

    def _judge(self, sink: str, seconds: float, limit: float) -> None:
        """Log that a sink lags, or has recovered: it lags by less than half of the limit."""
        if seconds >= limit and sink not in self._lagging:
            self._lagging |= {sink}
            self._log.warning("sink.lagging", sink=sink, lag_seconds=round(seconds, 1))
        elif seconds < limit / 2 and sink in self._lagging:
            self._lagging -= {sink}
            self._log.info("sink.recovered", sink=sink)
