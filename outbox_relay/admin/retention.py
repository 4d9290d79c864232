"""Retention by hand: the days and what keeps them, and one pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable
from outbox_relay.postgres.errors import advise_grant
from outbox_relay.postgres.retention import Pass, Person
from outbox_relay.postgres.store import Store
from outbox_relay.retention.archiver import Archiver
from outbox_relay.retention.passes import Outcome, RetentionPass, run_pass
from outbox_relay.retention.wording import day_name

BUSY_SECONDS, BUSY_PAUSE_SECONDS = 30.0, 0.5
"""Longest wait for the pass of another process, and the pause between two questions."""
AT_ONCE = "at_once needs the right to operate"
"""Part of the refusal of a role that may do a pass, but not choose the policy."""
BUSY = "another process is running retention, such as a relay that writes an archive: run this again later"


def retention_status(store: Store) -> dict[str, Any]:
    """Return the policy, and each day that holds events or was emptied, for ``retention status --json``.

    - ``day``: the first day of a partition (UTC), or "default" for events without a partition of their own.
    - ``events``: exact for an emptied or archived day, otherwise an estimate.
    - ``archived``: the address of the verified archive, or None. ``emptied``: the time, or None.
    - ``kept_by``: what keeps a day that is past keep_days, now. ``due`` is True for such a day, and
      ``due_seconds`` the time since then; None for the DEFAULT partition.
    - ``left_because`` and ``left_at``: why the newest pass left a due day that nothing kept, and when, or None.

    ``idle`` is True if no pass runs or has begun in the last 15 minutes; ``last_pass`` is the time of the newest one.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    with advise_grant("read"):
        return store.retention_status(live=True)


def preview_retention(store: Store) -> dict[str, Any]:
    """Return what a pass would empty, and change nothing: ``matched`` days, and each due day with its keepers.

    ``keep_days_of`` are the live relays whose files decide ``keep_days``.

    Raises as ``retention_status``.
    """
    with advise_grant("operate"):
        checks = {day_name(day): store.check_day(day, None) for day in store.due_days()}
        policy = store.retention_status(live=False)
    held = policy["hold_until"] is not None
    free = [day for day, check in checks.items() if not check.kept_by and not held]
    days = [{"day": day, "kept_by": check.kept_by} for day, check in checks.items()]
    kept = {"keep_days": policy["keep_days"], "keep_days_of": policy["keep_days_of"]}
    return {"matched": len(free), "exact": True, "days": days, "hold_until": policy["hold_until"], **kept}


class RetentionRun(NamedTuple):
    """A pass: its policy and outcome, and the live relays whose files decide keep_days."""

    policy: Pass
    outcome: Outcome
    keep_days_of: list[str]


def run_retention(store: Store, archiver: Archiver | None, by: Person, progress: Callable[[str], None]) -> RetentionRun:
    """Do one pass, and return it.

    A lower policy of all relays counts from now on if the role may operate, and as in a pass of a relay otherwise.

    Raises ``DatabaseUnavailable`` if another process does not end its pass, and as ``retention_status``.
    """

    def do(granted: Pass) -> Outcome:
        return RetentionPass(store, granted, archiver, None, progress).run()

    until = time.monotonic() + BUSY_SECONDS
    with advise_grant("operate"):
        owner = uuid4()
        while (result := _pass(store, owner, by, do)) is None:
            if time.monotonic() > until:
                raise DatabaseUnavailable(BUSY)
            time.sleep(BUSY_PAUSE_SECONDS)
        return RetentionRun(*result, (store.retention_status(live=False))["keep_days_of"])


def _pass(store: Store, owner: UUID, by: Person, do: Callable[[Pass], Outcome]) -> tuple[Pass, Outcome] | None:
    """Do a pass as a person, or as a relay does if the role is only a relay's."""
    try:
        return run_pass(store, owner, by, do, at_once=True)
    except DatabaseUnusable as error:
        if AT_ONCE not in str(error):
            raise
        return run_pass(store, owner, by, do)
