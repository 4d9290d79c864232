"""The figures that a relay has measured for all: they cost a page one row, however large the log is."""

from __future__ import annotations

from typing import Any, NamedTuple

from outbox_relay.postgres.store import Store
from outbox_relay.service.figures import STATES, load


class StoredFigures(NamedTuple):
    """Values by the name and the labels of their metric, and the age in seconds of the oldest; None without any."""

    values: dict[tuple[str, tuple[str, ...]], float]
    age: float | None

    def of_sink(self, sink: str) -> dict[str, Any]:
        """Return the backlog of ``sink``, its oldest event and its rows by state; each may be None."""
        value = self.values.get
        return {
            "backlog": _whole(value(("outbox_backlog_events", (sink,)))),
            "oldest_seconds": value(("outbox_oldest_undelivered_seconds", (sink,))),
            "position_lag_seconds": value(("outbox_position_lag_seconds", (sink,))),
            **{state: _whole(value(("outbox_exceptions", (sink, state)))) for state in STATES},
        }

    def of_log(self) -> dict[str, Any]:
        """Return the figures of the database; each may be None."""
        value = self.values.get
        return {
            "log_bytes": _whole(value(("outbox_log_bytes", ()))),
            "default_partition_rows": _whole(value(("outbox_default_partition_rows", ()))),
            "oldest_transaction_seconds": value(("outbox_oldest_transaction_seconds", ())),
            "lock_waits": _whole(value(("outbox_lock_waits", ()))),
        }


def read_figures(store: Store) -> StoredFigures:
    """Return the figures that are not too old. Without a relay there are none."""
    stored, now = store.stored_figures()
    entries = load(stored, now)
    values = {(v.name, v.labels): v.value for entry in entries if not entry.failed for v in entry.values}
    return StoredFigures(values, max((round(now - entry.at, 1) for entry in entries), default=None))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
