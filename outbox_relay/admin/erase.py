"""Erasures: payload, headers and key of delivered events are removed, in steps that are transactions of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.store import Store

STEP_IDS = 100_000
"""Number of ids that one step looks at."""
UNSETTLED_SECONDS = 10.0
"""Time for which an erasure begins again while the position of a shard has not passed an event."""
UNSETTLED_PAUSE_SECONDS = 0.25
LOCKED_SECONDS = 30.0
"""Time for which a step is taken again while other sessions hold a lock that it needs; each try takes 2 s."""
LOCKED = frozenset({"55P03", "40P01"})
"""SQLSTATEs of a lock that was not available, and of a deadlock. The step has changed nothing."""

Report = Callable[[str, int, int], None]
"""A function that is called with the phase of an erasure, and the ids that it has passed of how many."""


@dataclass(frozen=True, slots=True)
class Erased:
    """The result of an erasure.

    ``undelivered`` is empty unless it was refused: up to 20 dictionaries of uid, sink and state. ``left`` counts events
    that were committed meanwhile. ``archives`` are addresses of archives that may hold the events. ``key_hash`` is the
    keyed hash of the key, None for a uid. ``statistics`` names what the server keeps values in.
    """

    matched: int
    done: int
    left: int
    undelivered: Sequence[Mapping[str, str]] = ()
    archives: Sequence[str] = ()
    key_hash: str | None = None
    statistics: Sequence[str] = ()


def erase(
    store: Store,
    subject: Mapping[str, str],
    *,
    actor: str,
    reason: str | None,
    report: Report,
    dry_run: bool = False,
    patience: float = UNSETTLED_SECONDS,
) -> Erased:
    """Erase the events with the ``key`` or the ``uid`` in ``subject``; with ``dry_run``, only look at them.

    All are looked at before the first is changed. If one may still be delivered, nothing is changed: an event that only
    waits for its position is looked at again for ``patience`` seconds.

    Raises ``ConfigurationError``, ``NotFound``, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    given = {"subject": json.dumps(subject), "actor": actor, "reason": reason, "dry_run": dry_run, "most_ids": STEP_IDS}
    deadline = time.monotonic() + patience
    while True:
        result = _steps(store, given, report)
        waits = {each["state"] for each in result.undelivered} == {"pending"}
        if not waits or time.monotonic() > deadline:
            return result
        time.sleep(UNSETTLED_PAUSE_SECONDS)


def _steps(store: Store, given: Mapping[str, Any], report: Report) -> Erased:
    """Take the steps of one erasure until it is done or refused."""
    erasure: int | None = None
    while True:
        row = _step(store, {**given, "erasure_id": erasure})
        if row.phase in {"done", "refused"}:
            undelivered, archives, statistics = row.undelivered or (), row.archives or (), row.statistics or ()
            return Erased(row.matched, row.done, row.left_over, undelivered, archives, row.key_hash, statistics)
        erasure = row.erasure_id
        report(row.phase, row.place, row.upto_id)


def _step(store: Store, given: Mapping[str, Any]) -> Any:
    """Take one step and return its row."""
    deadline = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            [row] = store.call("erase", given, "operate")
        except StatementFailed as error:
            if error.sqlstate not in LOCKED or time.monotonic() > deadline:
                raise
        else:
            return row
