"""The turns of keys whose rows are claimed one after another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from structlog.stdlib import get_logger

from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.measures import SinkMeasures
from outbox_relay.relay.rows import Rows
from outbox_relay.sinks.contract.handing import an_event

KEYS = ["a", "b", "c"]


class HeldRows:
    """A store in which each of ``KEYS`` has any number of held rows, of which none is in flight."""

    def held_keys(self, *_: object) -> list[str]:
        """Return the keys with held rows."""
        return KEYS

    def claim_rows(self, *values: Any, keys: Sequence[str], **_: Any) -> list[ClaimedRow]:
        """Return the first rows of the first keys."""
        _sink, _relay, lease, _seconds, most, _bytes = values
        return [ClaimedRow(an_event(key=key), True, 0, 1, lease) for key in keys[:most]]


def test_keys_with_held_rows_take_turns() -> None:
    """Goes red when a key is claimed again before the others that wait as well: with few slots, those starve."""
    outcomes = SimpleNamespace(
        parts=SimpleNamespace(
            spec=SimpleNamespace(name="s", queued=False, hold=False),
            sink=SimpleNamespace(timeout_seconds=1.0, keeps_order=False),
            store=HeldRows(),
            clock=SimpleNamespace(monotonic=lambda: 100.0),
            relay=uuid4(),
            measures=SinkMeasures(),
            log=get_logger(),
            db_time=lambda: datetime.now(UTC),
        ),
        blocked=KEYS,
        next_due=float("inf"),
        bound=SimpleNamespace(remove=list[int]().append),
    )
    rows = Rows(cast("Any", outcomes))
    rows.suspect_was_last = True
    claimed = list[str | None]()
    for _ in range(2 * len(KEYS)):
        found = rows.claim(1)
        claimed += [row.event.key for row in found]
        rows.written(found, {row.event.id for row in found}, found, 1)
    assert claimed == [*KEYS, *KEYS]
