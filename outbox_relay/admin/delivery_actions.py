"""Retries and discards of deliveries, in steps that are transactions of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outbox_relay.admin.deliveries import STATES, Filter, count_deliveries, list_deliveries
from outbox_relay.postgres.store import Store

STEP_ROWS = 1_000
"""Maximum number of deliveries that one step looks at."""
RETRY_ROWS = 100
"""Maximum number of deliveries that one step of a retry makes due. A longer step would delay the events of the log."""
STEP_SECONDS = 0.05
"""Minimum interval between the steps of a retry with a rate, unless it allows less than one delivery in that time."""
FULL_PAUSE_SECONDS = 0.05
"""Pause before the next step while the sinks have enough deliveries that are due."""
FULL_SECONDS = 60.0
"""Time after which a retry ends if no delivery that is due is delivered."""
UNSETTLED_SECONDS = 10.0
"""Time for which a discard is repeated for deliveries whose events the position of their shard has not passed."""
UNSETTLED_PAUSE_SECONDS = 0.25
UNSETTLED_MOST = 10_000
"""Maximum number of such deliveries that are remembered."""
NAMED_UIDS = 100
"""Maximum number of uids that messages are looked up for."""

Report = Callable[[int], None]
"""A function that is called with the number of deliveries that were changed so far."""


@dataclass(slots=True)
class Result:
    """The number of deliveries that an action changed, and why others are left.

    ``under_way`` are being delivered or locked. ``unsettled`` would be read again and delivered. ``stalled``: the
    action ended early because the sinks deliver none of those that are due.
    """

    done: int = 0
    under_way: int = 0
    unsettled: int = 0
    stalled: bool = False
    unvisited: int = 0
    """The number of deliveries that an action which ended early did not look at, counted up to 10,000."""

    @property
    def left(self) -> int:
        """The number of matching deliveries that were not changed."""
        return self.under_way + self.unsettled + self.unvisited


@dataclass(slots=True)
class _Steps:
    """An action in progress: its parameters for each step, where the next step begins, and its result so far."""

    store: Store
    name: str
    parameters: dict[str, Any]
    report: Report
    result: Result = field(default_factory=Result)
    after: tuple[int, str] | None = (0, "")
    audit_id: int | None = None

    def take(self, **changes: Any) -> Any:
        """Run the next step, count what it changed, and return its row."""
        after_id, after_sink = self.after or (0, "")
        place = {"after_id": after_id, "after_sink": after_sink, "most": STEP_ROWS, "audit_id": self.audit_id}
        [row] = self.store.call(self.name, {**self.parameters, **place, **changes}, "operate")
        self.audit_id = row.audit_id
        self.after = None if row.next_id is None else (row.next_id, row.next_sink)
        self.result.done += row.done
        self.report(self.result.done)
        return row


def _count_unvisited(store: Store, wanted: Filter, done: int) -> int:
    """Return how many deliveries an action has left that ended early. Retried ones still match if they were waiting."""
    matched = count_deliveries(store, wanted).count
    is_bound = "as_of" in wanted  # what was retried is not meant any more
    return max(0, matched - done) if "waiting" in wanted.get("states", ()) and not is_bound else matched


def retry_deliveries(
    store: Store,
    wanted: Filter,
    *,
    actor: str,
    report: Report,
    reason: str | None = None,
    rate: float | None = None,
) -> Result:
    """Make the deliveries that ``wanted`` selects due now, and reset their attempt counts.

    At most ``rate`` of them become due per second. A step waits until those of earlier steps have been delivered, so
    that they do not fill the sink.

    Raises ``ConfigurationError``, ``NotFound``, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    parameters = {"filter": json.dumps(wanted), "actor": actor, "reason": reason}
    steps, pace = _Steps(store, "dead_retry", parameters, report), _Pace(rate)
    seen, seen_at = None, time.monotonic()
    looks = STEP_ROWS
    while steps.after is not None:
        allowed = pace.allowed()
        row = steps.take(most=max(looks, allowed), most_done=allowed)
        if not row.is_full:
            looks = allowed if row.done == allowed else STEP_ROWS
            pace.spend(row.done)
            steps.result.under_way += row.under_way
        elif row.due_mark != seen:
            seen, seen_at = row.due_mark, time.monotonic()
            time.sleep(FULL_PAUSE_SECONDS)
        elif time.monotonic() - seen_at <= FULL_SECONDS:
            time.sleep(FULL_PAUSE_SECONDS)
        else:
            steps.result.stalled = True
            steps.result.unvisited = _count_unvisited(store, wanted, steps.result.done)
            break
    return steps.result


class _Pace:
    """A rate per second; None means no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._began = time.monotonic()
        self._spent = 0

    def allowed(self) -> int:
        """Return the number of deliveries that the next step may change, after a wait if it would be 0."""
        if self._rate is None:
            return RETRY_ROWS
        wait = (self._spent + max(1.0, self._rate * STEP_SECONDS)) / self._rate - (time.monotonic() - self._began)
        if wait > 0:
            time.sleep(wait)
        allowed = int((time.monotonic() - self._began) * self._rate) - self._spent
        return min(max(allowed, 1), RETRY_ROWS)

    def spend(self, count: int) -> None:
        """Count changed deliveries. Time in which there was none to change is not made up for."""
        self._spent += count
        if self._rate is not None:
            self._spent = max(self._spent, int((time.monotonic() - self._began - 1.0) * self._rate))


def discard_deliveries(store: Store, wanted: Filter, *, actor: str, reason: str, report: Report) -> Result:
    """Delete the deliveries that ``wanted`` selects, and record that they were discarded for ``reason``.

    Those whose events the position of their shard has not passed yet are tried again for ``UNSETTLED_SECONDS``.

    Raises as ``retry_deliveries``.
    """
    parameters = {"filter": json.dumps(wanted), "actor": actor, "reason": reason, "among": None}
    steps, unsettled = _Steps(store, "dead_discard", parameters, report), list[UUID]()
    while steps.after is not None:
        row = steps.take()
        steps.result.under_way += row.under_way
        steps.result.unsettled += row.unsettled
        unsettled += (row.unsettled_uids or [])[: UNSETTLED_MOST - len(unsettled)]
    deadline = time.monotonic() + UNSETTLED_SECONDS
    while unsettled and time.monotonic() < deadline:
        time.sleep(UNSETTLED_PAUSE_SECONDS)
        unsettled = _discard_settled(steps, unsettled)
    return steps.result


def _discard_settled(steps: _Steps, uids: list[UUID]) -> list[UUID]:
    """Try these deliveries again, and return the uids of those that are still not settled."""
    still = list[UUID]()
    for first in range(0, len(uids), STEP_ROWS):
        steps.after = (0, "")
        row = steps.take(among=uids[first : first + STEP_ROWS])
        steps.result.unsettled = max(0, steps.result.unsettled - row.done)
        still += row.unsettled_uids or []
    return still


def positions_behind(store: Store, wanted: Filter) -> str:
    """Return the sinks of the deliveries that ``wanted`` selects, with the states that keep their positions back."""
    sinks = {found["sink"] for found in list_deliveries(store, wanted, STEP_ROWS)}
    return ", ".join(_with_state(row) for row in store.named("status_sinks", {}) if row.name in sinks)


def _with_state(sink: Any) -> str:
    reasons = ["paused"] * sink.paused + [f"circuit {sink.circuit}"] * (sink.circuit != "closed")
    reasons += ["no relay owns its shards"] * (sink.unowned > 0 and not sink.paused)
    return f"{sink.name} ({', '.join(reasons)})" if reasons else sink.name


def missing(store: Store, wanted: Filter, states: Sequence[str]) -> tuple[list[str], list[str]]:
    """Explain, a line for each of up to ``NAMED_UIDS`` uids, why ``wanted`` selects no delivery of it.

    ``states`` are those that the action can select. Return also which of these uids are those of no known event.
    """
    uids: list[str] = list(wanted.get("uids", ()))[:NAMED_UIDS]
    if not uids:
        return [], []
    rows = list_deliveries(store, {"uids": uids, "states": list(STATES)}, STEP_ROWS)
    known = store.call("known_uids", {"uids": uids}, "read")
    discarded = {str(row.uid) for row in known if row.discarded}
    events = {str(row.uid) for row in known} | {row["uid"] for row in rows}
    lines, unknown = list[str](), list[str]()
    for uid in uids:
        own = [row for row in rows if row["uid"] == uid and row["sink"] == wanted.get("sink", row["sink"])]
        if own:
            found = ", ".join(f"{row['state']} for sink {row['sink']}" for row in own)
            other = next((row["state"] for row in own if row["state"] in states), None)
            lines.append(f"event {uid} is {found}" + (f": add --state {other} to select it" if other else ""))
        elif uid not in events:
            lines.append(f"no event {uid} is known")
            unknown.append(uid)
        elif uid in discarded:
            lines.append(f"event {uid} was discarded")
        else:
            lines.append(
                f"event {uid} has no delivery of its own: it was delivered, or is still to be read from the log "
                f"(outbox-relay why {uid})"
            )
    return lines, unknown
