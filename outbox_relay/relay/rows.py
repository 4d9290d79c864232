"""The claims of rows that are due, and the keys that become free by their outcomes.

Any relay that serves a sink may claim its rows. A row of a key is claimed only if no earlier row of its key takes part
in the order, or together with the earlier ones for a sink that keeps the order of its calls. The rows of a key are
therefore delivered one after another, by whichever relay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from uuid import UUID

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import max_wire_bytes
from outbox_relay.postgres.log import MOST_PAYLOAD
from outbox_relay.postgres.rows import ClaimedRow, RowPlace
from outbox_relay.relay.calls import new_row_lease
from outbox_relay.relay.dispatch import MOST_ROWS
from outbox_relay.relay.outcomes import LEASE_MARGIN_SECONDS, Outcomes
from outbox_relay.relay.settle import FIRST_PAUSE_SECONDS, MOST_TRIES, SHRINK, is_for_its_size, pause

POLL_SECONDS = 1.0
"""Interval between claims for rows whose due time this relay does not know, and between sweeps while keys are held."""
QUEUE_POLL_SECONDS = 0.25
"""The same for a queue, whose rows other relays make."""
FOLLOWED_POLL_SECONDS = 0.05
"""The first of these intervals after many rows that were due unexpectedly, doubled after each claim that finds none."""
FOLLOWED_ROWS = 20
"""Number of rows in a claim that count as many. Fewer are retries of other relays, which poll for those themselves."""
SWEEP_SECONDS = 5.0
"""Interval between sweeps while no key is blocked here, and between looks for rows that may have killed their owners.

Only a relay that crashed leaves such rows behind.
"""
BUSY_POLL_SECONDS = 0.1
"""Interval between claims while keys are blocked."""
UNBLOCK_SECONDS = 0.05
"""Interval between questions whether blocked keys are free."""
REST_FACTOR, MOST_REST_SECONDS = 16, 0.05
"""Rest after a claim while events of the log are delayed by batches of rows, as a multiple of its duration."""
EXTEND_SECONDS = 0.5
"""Interval at which leases of rows are extended. They outlast the time limit of their calls by more than that."""
MOST_BYTES = 16 << 20
"""Maximum bytes of payload, key and headers in one claim, not counting its first row."""
MOST_KEYS = 1000
"""Maximum number of keys in one question and in one sweep."""
FEWEST_KEYS, KEYS_PER_ROW = 100, 4
"""Number of keys in a claim: ``KEYS_PER_ROW`` for each row that it may take, and at least ``FEWEST_KEYS``."""
MOST_PAUSE_SECONDS = 1.0
"""Maximum pause after a claim that failed."""
OTHER_TURNS = 8
"""Number of claims of which one takes rows that were made under another ``fair_by``, if there are any."""
MOST_UNFINISHED = 10
"""Consecutive claims that a bound ended before they found a row, after which the next one waits."""
NEVER = float("inf")


class ClaimSize:
    """The limits of the next claim: smaller after one that failed, and larger after those that succeeded."""

    def __init__(self) -> None:
        self.rows = MOST_ROWS
        self.payload_bytes = MOST_BYTES
        self.failed = 0
        """The number of consecutive claims that failed."""
        self.bare = False
        """True if a claim of a single row failed, so that the next one comes without its payload."""

    def failure(self, error: StatementFailed) -> float:
        """Reduce the limits after a failure that a smaller claim may avoid. Return the pause in seconds."""
        self.failed += 1
        if is_for_its_size(error):
            self.bare = self.rows == 1
            self.rows = max(1, self.rows // SHRINK)
            self.payload_bytes = self.payload_bytes // SHRINK if self.rows > 1 else 0
        return min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failed)

    def success(self) -> None:
        """Raise the limits after a claim that succeeded."""
        self.failed = 0
        if not self.bare:
            self.rows = min(MOST_ROWS, 2 * self.rows)
            self.payload_bytes = min(MOST_BYTES, max(1 << 10, 2 * self.payload_bytes))
        self.bare = False


class Rows:
    """Claims the rows of one session: those that are due, the first ones of keys, and those that may kill a relay."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._parts = outcomes.parts
        self._store = outcomes.parts.store
        self._now = outcomes.parts.clock.monotonic
        self._asked_at = self._swept_at = self._suspected_at = self._began_at = self._unblocked_at = -NEVER
        self._not_before = -NEVER
        self._swept: str | None = None
        self._poll_seconds = POLL_SECONDS
        self._size = ClaimSize()
        self._place: RowPlace | None = None
        """The place at which the last claim ended, if it got as many rows as it may."""
        self._suspects = self.suspect_was_last = False
        self._heads: dict[str, None] = {}
        """Keys whose first row may have become claimable, those that were looked up longest ago first."""
        self._doubtful: list[UUID] = []
        """Leases of claims that failed here and may have taken effect in the database."""
        self._in_hand: dict[int, UUID] = {}
        """The leases of claimed rows without a written outcome, by id, of a queue: no index finds them."""
        self.extended: dict[int, float] = {}
        """The ends of extended leases of rows in flight, as of the sink."""
        self._walk_end: str | None = None
        self._unfinished = self._turn = 0

    # -- when -----------------------------------------------------------------------------------------------------

    def due_at(self) -> float:
        """Return when the next claim is due, in seconds of the clock."""
        if self._heads or 0 < self._unfinished < MOST_UNFINISHED:
            at = -NEVER
        else:
            at = min(self._outcomes.next_due, self._asked_at + self._interval())
        return max(at, self._not_before)

    def _interval(self) -> float:
        if self._parts.spec.queued:
            return QUEUE_POLL_SECONDS
        return BUSY_POLL_SECONDS if len(self._outcomes.blocked) else self._poll_seconds

    def written(
        self, rows: Sequence[ClaimedRow], ours: Collection[int], freed: Sequence[ClaimedRow], gone: int
    ) -> None:
        """Record that outcomes of claimed rows are in the database, those of ``ours``.

        Others may follow those of ``freed``, and ``gone`` of them are there no more.
        """
        self._outcomes.bound.remove(gone)
        self._heads.update((row.event.key, None) for row in freed if row.ordered and row.event.key is not None)
        for row in rows:
            if self._in_hand.get(row.event.id) == row.lease:  # not one that went back and was claimed again
                del self._in_hand[row.event.id]
        if lost := sum(row.event.id not in ours for row in rows):
            self._parts.measures.lost_rows(lost)
            self._parts.log.warning("rows.lost", sink=self._parts.spec.name, rows=lost)

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim(self, most: int, *, rests: bool = False) -> list[ClaimedRow]:
        """Return at most ``most`` rows to deliver now. With ``rests``, the next claim is not due for a while.

        A row that may have killed its owners is returned alone, in turn with the others.
        """
        now = self._now()
        claimed = self._claim_due(most, now)
        if rests:
            rest = min(REST_FACTOR * (self._now() - now), MOST_REST_SECONDS)
            self._not_before = max(self._not_before, self._now() + rest)
        return claimed

    def _claim_due(self, most: int, now: float) -> list[ClaimedRow]:
        due = self._suspects or now - self._suspected_at >= SWEEP_SECONDS
        if due and not self.suspect_was_last and (suspect := self._claim_suspect(now)):
            return suspect
        if self._parts.spec.queued:
            self.suspect_was_last = False
            return self._claim_queued(most, now)
        often = self._swept is not None or len(self._outcomes.blocked)
        if now - self._swept_at >= (POLL_SECONDS if often else SWEEP_SECONDS) and len(self._heads) < MOST_KEYS:
            self._sweep(now)
        most, most_bytes = min(most, self._size.rows), self._size.payload_bytes
        heads = list(islice(self._heads, min(MOST_KEYS, max(FEWEST_KEYS, KEYS_PER_ROW * most))))
        for key in heads:
            del self._heads[key]
        is_expected = bool(heads) or self._outcomes.next_due <= now
        self._forget_due(now)
        after = self._place_of_next(now, by_key=bool(heads))
        claimed = self._claim(most, heads, after=after)
        if claimed or after is None:
            self._adapt_poll(len(claimed), is_expected=is_expected)
        full = len(claimed) == most
        self._place = _end(claimed) if full else None
        if not claimed and self.suspect_was_last:
            claimed = self._claim_suspect(now)
        else:
            self.suspect_was_last = False
        if full or after is not None or self._size.failed or _bytes(claimed) > most_bytes:
            # The keys of claimed rows come back behind all others, once those have their outcomes.
            taken = {row.event.key for row in claimed}
            self._heads.update((key, None) for key in heads if key not in taken)
            self._asked_at = -NEVER  # more rows may be due
        elif not claimed:
            self._asked_at = now
        return claimed

    def _claim_queued(self, most: int, now: float) -> list[ClaimedRow]:
        self._forget_due(now)
        claimed = self._claim(most, ())
        self._asked_at = -NEVER if claimed else now
        return claimed

    def _forget_due(self, now: float) -> None:
        if self._outcomes.next_due <= now:
            self._outcomes.next_due = NEVER

    def _place_of_next(self, now: float, *, by_key: bool) -> RowPlace | None:
        """Return the place behind which the next claim looks for rows, or None if it begins at the first one.

        Most rows before the place are in flight, so that a claim would look at them in vain. At least every
        ``POLL_SECONDS``, and after rows of keys were settled, a claim begins at the first row, since some of them may
        have come back, or a row that was due later may have moved the place beyond them.
        """
        if self._place is not None and not by_key and now - self._began_at < POLL_SECONDS:
            return self._place
        self._began_at = now
        return None

    def _adapt_poll(self, found: int, *, is_expected: bool) -> None:
        """Poll often after many rows whose due time was not known here, as a bulk retry makes them due in steps."""
        if not found:
            self._poll_seconds = min(POLL_SECONDS, 2 * self._poll_seconds)
        elif not is_expected and found >= FOLLOWED_ROWS:
            self._poll_seconds = FOLLOWED_POLL_SECONDS

    def _sweep(self, now: float) -> None:
        """Add the next keys with held rows, which another relay may have left behind, ``MOST_KEYS`` at most."""
        self._swept_at = now
        try:
            keys = self._store.held_keys(self._parts.spec.name, self._swept, MOST_KEYS)
        except StatementFailed:
            return
        self._swept = keys[-1] if len(keys) == MOST_KEYS else None
        self._heads.update(dict.fromkeys(keys))

    def _claim_suspect(self, now: float) -> list[ClaimedRow]:
        """Claim a row that may have killed its owners."""
        claimed = self._claim(1, (), suspects=True)
        self._suspected_at, self._suspects, self.suspect_was_last = now, bool(claimed), bool(claimed)
        return claimed

    def _claim(
        self, most: int, heads: Sequence[str], *, suspects: bool = False, after: RowPlace | None = None
    ) -> list[ClaimedRow]:
        """Claim at most ``most`` rows: fewer after a claim that failed, and none if this one fails."""
        size, bare, sink = self._size, self._size.bare, self._parts.sink
        lease = new_row_lease(self._parts.db_time())
        seconds = sink.timeout_seconds + 2 * LEASE_MARGIN_SECONDS
        try:
            self._give_doubtful_back()
            self._doubtful.append(lease)
            with self._parts.measures.claim.time():
                claimed = self._fetch(lease, seconds, min(most, size.rows), heads, suspects=suspects, after=after)
        except StatementFailed as error:
            if size.failed.bit_count() <= 1:  # fewer and fewer lines while claims fail
                log, name = self._parts.log, self._parts.spec.name
                log.warning("rows.claim_failed", sink=name, reason=str(error), rows=size.rows)
            self._not_before = self._now() + size.failure(error)
            return []
        self._doubtful.clear()
        size.success()
        if self._parts.spec.queued:
            self._in_hand.update((row.event.id, lease) for row in claimed)
        return [self._with_payload(row) for row in claimed] if bare else claimed

    def _fetch(
        self,
        lease: UUID,
        lease_seconds: float,
        most: int,
        heads: Sequence[str],
        *,
        suspects: bool,
        after: RowPlace | None,
    ) -> list[ClaimedRow]:
        parts, size = self._parts, self._size
        who = (parts.spec.name, parts.relay, lease, lease_seconds, most, size.payload_bytes)
        most_payload = 0 if size.bare else MOST_PAYLOAD
        if parts.spec.queued and not suspects:
            return self._fetch_queued(who, most_payload)
        return self._store.claim_rows(
            *who,
            hold=parts.spec.hold,
            keys=heads,
            suspects=suspects,
            with_followers=parts.sink.keeps_order,
            most_payload=most_payload,
            after=after,
        )

    def _fetch_queued(self, who: tuple[str, UUID, UUID, float, int, int], most_payload: int) -> list[ClaimedRow]:
        """Claim by priority, or by turns of tenants. Rows that were made under another ``fair_by`` have turns too."""
        spec = self._parts.spec
        self._turn = (self._turn + 1) % OTHER_TURNS
        for fair in (spec.fair,) if self._turn else (not spec.fair, spec.fair):
            claim = self._store.claim_queued(*who, most_payload=most_payload, fair=fair, after=self._walk_end)
            self._walk_end = claim.walk_end
            self._unfinished = self._unfinished + 1 if claim.unfinished else 0
            if claim.rows:
                return claim.rows
        return []

    def _with_payload(self, row: ClaimedRow) -> ClaimedRow:
        """Return a row with its payload, or with the reason why it cannot be read, after claims that failed.

        Raises ``StatementFailed`` if reads fail repeatedly for another reason than the payload.
        """
        event, reason = row.event, ""
        if event.fault is None or not event.fault.startswith("payload"):
            return row
        for tries in range(1, MOST_TRIES):
            try:
                found = self._store.row_payload(self._parts.spec.name, event.id, row.lease)
            except StatementFailed as error:
                if tries == MOST_TRIES - 1 and not is_for_its_size(error):
                    raise
                reason = str(error)
                pause(tries)
            else:
                if found is None:
                    return row
                payload, fault = found
                return row._replace(event=event._replace(payload=payload or b"", fault=fault))
        return row._replace(event=event._replace(fault=f"its payload could not be read: {reason}"))

    # -- what a session leaves behind ---------------------------------------------------------------------------

    def _give_doubtful_back(self) -> None:
        """Return the rows of claims whose answer was lost: they were never tried, and would count a claim."""
        name, doubtful = self._parts.spec.name, self._doubtful
        if doubtful and self._parts.spec.queued:
            with suppress(StatementFailed):  # no index finds them: they come back when their leases end
                self._store.give_queued_back(name, self._parts.relay, doubtful)
        elif doubtful:
            self._store.give_leases_back(name, doubtful)
        doubtful.clear()

    def give_all_back(self) -> None:
        """Give back all rows that were claimed and not settled. No call with them can be sent any more."""
        if self._parts.spec.queued:
            self._store.give_claimed_back(self._parts.spec.name, self._in_hand.items())
            self._in_hand.clear()
        else:
            self._store.give_rows_back(self._parts.spec.name, self._parts.relay)
        self._give_doubtful_back()

    # -- long deliveries ----------------------------------------------------------------------------------------

    def extend(self, under_way: Mapping[int, UUID]) -> float:
        """Extend leases of rows whose deliveries take longer than the time limit of the sink, since it says so.

        ``under_way`` are the leases of the rows in flight, by id. Return when to call this again.
        """
        ends, lease_now = self._parts.sink.deadlines(), self._parts.clock.lease()
        self.extended = {event: end for event, end in self.extended.items() if event in under_way}
        due = {
            event: end
            for event, end in ends.items()
            if event in under_way and end > self.extended.get(event, 0.0) + EXTEND_SECONDS
        }
        if due:
            rows = [(event, under_way[event], end - lease_now + LEASE_MARGIN_SECONDS) for event, end in due.items()]
            with suppress(StatementFailed):  # the next look tries again
                extended = self._store.extend_leases(self._parts.spec.name, rows)
                self.extended.update((event, due[event]) for event in extended)
        return self._now() + EXTEND_SECONDS

    # -- blocked keys -------------------------------------------------------------------------------------------

    def unblock(self) -> float:
        """Free the blocked keys of which no row is left. Return when to call this again, in seconds of the clock.

        Their events are delivered straight from the log again.
        """
        blocked, now = self._outcomes.blocked, self._now()
        if not len(blocked):
            return NEVER
        if now < self._unblocked_at:
            return self._unblocked_at
        self._unblocked_at = now + UNBLOCK_SECONDS
        asked_at, keys = blocked.settled(MOST_KEYS)
        if keys:
            spec, server = self._parts.spec, self._outcomes.settler.server
            try:
                still = self._store.still_blocked(spec.name, keys, spec.hold, server=server)
            except StatementFailed:  # the keys stay blocked until their next turn
                self._unblocked_at = now + MOST_PAUSE_SECONDS
            else:
                blocked.free(asked_at, keys, still)
        return self._unblocked_at


def _bytes(claimed: Sequence[ClaimedRow]) -> int:
    return 2 * max_wire_bytes([row.event for row in claimed])


def _end(claimed: Sequence[ClaimedRow]) -> RowPlace | None:
    """Return the last place of rows that were claimed, or None if some of them may have been found by their keys."""
    places = [row.place for row in claimed if row.place is not None and not row.ordered]
    return max(places) if places and len(places) == len(claimed) else None
