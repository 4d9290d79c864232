"""The order in which events are handed to a sink: of one key one after another, within the circuit and all limits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from uuid import UUID

from outbox_relay.domain.event import DELIVER_AT, FAULT, StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.outcomes import Delivered, Unavailable, Verdict
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.calls import LogWork, Permit, RowWork, SentCall, new_row_lease
from outbox_relay.relay.outcomes import LEASE_MARGIN_SECONDS, SUSPECT_CRASHES, Outcomes
from outbox_relay.relay.sink_leases import Lease
from outbox_relay.sinks import Call

CALL_BYTES = 8 << 20
"""Maximum payload of a call with events of several chunks."""
START_SECONDS = 1.0
"""Time after a claim within which the calls with its rows begin. Rows of later ones go back."""
RESUME_SECONDS = 0.1
"""Interval at which keys are looked at that wait while the destination may be down."""
FLOW_SECONDS = 1.0
"""Time after the last event of the log during which the log counts as flowing."""
ROW_SHARE = 4
"""Rows take one slot in this number while the log flows. A wave of them delays new events."""
CLAIM_SECONDS = 0.025
"""Time in which the rows of one claim begin. A claim of more rows is one long statement."""
FAIR_CLAIM_SECONDS = 0.005
"""The same where tenants take turns: a row that a tenant adds waits for the rows that were claimed before."""
MOST_AHEAD = 4
"""Maximum number of rows for each slot that are claimed so that none is idle until the next claim."""
LEAST_SECONDS = 0.0005
"""Duration of a call below which a claim does not become larger."""
FIRST_SECONDS = 1.0
"""Assumed duration of calls before the first one."""
WEIGHT, ROUND_WEIGHT, MOST_WEIGHED = 0.1, 0.5, 100
"""Weight of a call in the mean duration, and of all calls together that are in flight at once, at most that many."""
MOST_ROWS = 1000
"""Maximum number of rows in one claim."""
BATCH_ROWS = 100
"""The same for a sink that takes batches, while the log flows and no event of it waits for a row."""
NEVER = float("inf")


class Dispatcher:
    """Hands chunks of the log and claimed rows to the sink of one session, and applies the verdicts.

    A sink that keeps order gets batches, several calls at once. After an event is unavailable, nothing is sent until
    every call in flight has returned. The delivered events of a key are then a prefix of those handed over. The rest is
    sent again in order, beginning with a single event that shows whether the destination answers.

    Any other sink gets one event per call, and one event of each key at a time. A call that outlasts
    ``park_after_seconds`` makes its event a leased row, so that no position waits for it.

    Where both wait, the log and rows take turns, also as probes.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._parts = outcomes.parts
        self._sink = outcomes.parts.sink
        self._circuit = outcomes.circuit
        self._log: deque[LogWork] = deque()
        self._turns: deque[LogWork] = deque()
        """The next event of each key whose previous one is done. They are older than ``_log``."""
        self._probed: deque[LogWork] = deque()
        """Events that were unavailable while the circuit was not closed."""
        self._probed_were_last = False
        self._followers: dict[str, deque[LogWork]] = {}
        """The events that wait for an earlier one of their key, for every key that has a turn."""
        self._stopped: list[LogWork] = []
        """Events that could only become rows behind others, and wait while the destination may be down."""
        self._resume_at = NEVER
        self._again: list[tuple[float, int, LogWork]] = []
        """Events that were unavailable while the circuit was closed, by the time of their next call."""
        self._unavailable_since: float | None = None
        self._undone: list[LogWork] = []
        self._rows: deque[RowWork] = deque()
        self._calls: dict[Call, SentCall] = {}
        """The calls in flight, the oldest first."""
        self._log_calls = self._row_calls = 0
        self._rows_were_last = False
        self._suspect: RowWork | None = None
        self._flowed_at = -NEVER
        self._call_seconds = FIRST_SECONDS
        self._number = count(1)
        self._held: Mapping[int, Lease] = {}
        self._crashed = False
        self.next_at = NEVER
        """The time when something may be sent that may not be now, in seconds of the clock."""

    # -- what waits ---------------------------------------------------------------------------------------------

    def add(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after all chunks that were added before it."""
        self._flowed_at = self._parts.clock.monotonic()
        number, indexes, step = next(self._number), range(len(chunk.events)), self._sink.max_batch
        self._log.extend(LogWork(number, chunk, indexes[first : first + step]) for first in indexes[::step])

    def add_rows(self, rows: Sequence[ClaimedRow], until: float, *, suspect: bool = False) -> None:
        """Deliver claimed rows, whose calls begin before the ``lease_clock()`` value ``until``.

        No row is claimed before a ``suspect`` has its outcome, if the sink takes batches.
        """
        step = self._sink.max_batch
        self._rows.extend(RowWork(rows[first : first + step], until) for first in range(0, len(rows), step))
        if suspect and self._sink.keeps_order:
            self._suspect = self._rows[-1]

    @property
    def saturated(self) -> bool:
        """True while enough events of the log wait. Those emitted meanwhile are better read later, together."""
        waiting = len(self._log) + len(self._turns) + len(self._probed)
        return waiting > 0 if self._sink.keeps_order else waiting >= self._outcomes.slots.limit

    @property
    def in_flight(self) -> int:
        """The number of calls that have not ended."""
        return len(self._calls)

    @property
    def yields(self) -> bool:
        """True while claims leave time to the events of the log: batches of rows delay them."""
        return self._sink.keeps_order and self._flows and not len(self._outcomes.blocked)

    @property
    def _flows(self) -> bool:
        is_recent = self._parts.clock.monotonic() - self._flowed_at < FLOW_SECONDS
        return is_recent or self._log_waits or self._log_calls > 0

    @property
    def _log_waits(self) -> bool:
        return bool(self._log or self._turns or self._probed)

    def _log_may_go(self, now: float) -> bool:
        return self._log_waits and self._outcomes.bound.has_capacity(now)

    def row_room(self, now: float, busy_seconds: float) -> int:
        """Return the number of rows that can be handed over soon if they are claimed now.

        ``busy_seconds`` pass at least until the next claim: no slot is to be idle meanwhile.
        """
        outcomes = self._outcomes
        if self._suspect is not None or not outcomes.may_send or self._undone:
            return 0
        if outcomes.limits.wait(now, replay=outcomes.is_replay) > 0:
            return 0
        if self._circuit.state != "closed":
            mine = not (self._rows_were_last and self._log_may_go(now))
            has_slot = len(self._calls) < outcomes.slots.limit
            return int(mine and has_slot and not self._rows and self._circuit.may_probe(now))
        share = self._row_share
        free = min(outcomes.slots.limit - len(self._calls), share - self._row_calls)
        waiting = sum(len(work.rows) for work in self._rows)
        if free <= 0 or (free == 1 and self._rows_were_last and self._log_may_go(now)):
            return 0
        if self._sink.keeps_order:
            most = BATCH_ROWS if self.yields else MOST_ROWS
            return 0 if waiting else min(free * self._sink.max_batch, most, outcomes.limits.room(now))
        fair, call_seconds = self._parts.spec.fair, max(self._call_seconds, LEAST_SECONDS)
        soon = int((1 if self._flows else share) * (FAIR_CLAIM_SECONDS if fair else CLAIM_SECONDS) / call_seconds)
        ahead = 0 if fair else int(share * min(busy_seconds / call_seconds, MOST_AHEAD))
        wanted = min(max(free, soon, ahead), MOST_ROWS, outcomes.limits.room(now))
        return wanted - waiting if 2 * waiting <= wanted else 0

    @property
    def _row_share(self) -> int:
        limit = self._outcomes.slots.limit
        return max(1, limit // ROW_SHARE) if self._flows else limit

    def rows_under_way(self) -> dict[int, UUID]:
        """Return the leases of the rows in flight, by id."""
        works = chain.from_iterable(call.work for call in self._calls.values())
        return {row.event.id: row.lease for work in works if isinstance(work, RowWork) for row in work.rows}

    def _watch(self, call: SentCall, until: float) -> None:
        leases, call.rows_until = self._parts.leases, until
        leases.rows_until = min(leases.rows_until, until)

    def watch_rows(self, extended: Mapping[int, float]) -> None:
        """Tell the watchdog when the first lease of rows in flight ends. ``extended`` are ends of calls by id."""
        calls = [call for call in self._calls.values() if call.rows_until != NEVER]
        ends = (max(call.rows_until, *(extended.get(e.id, 0.0) for e in call.events)) for call in calls)
        self._parts.leases.rows_until = min(ends, default=NEVER)

    def _give_rows_back(self) -> None:
        """Give back the rows that may not be sent soon: another relay may deliver them meanwhile."""
        stays = self._circuit.state == "closed" and self._outcomes.may_send and self._parts.leases.serving
        oldest = self._parts.clock.lease() + LEASE_MARGIN_SECONDS - START_SECONDS
        while self._rows and not (stays and self._rows[0].until > oldest):
            self._give_back(self._rows.popleft())
        if self._rows:
            self.next_at = min(self.next_at, self._parts.clock.monotonic() + START_SECONDS)

    def _give_back(self, work: RowWork) -> None:
        self._outcomes.give_back(work.rows)
        if work is self._suspect:
            self._suspect = None

    def withdrawn(self) -> None:
        """Count no call any more: the sink has forgotten all of them."""
        for _ in self._calls:
            self._end_call()
        self._calls.clear()
        self._parts.leases.rows_until = NEVER

    # -- calls --------------------------------------------------------------------------------------------------

    def submit(self, now: float) -> None:
        """Hand over what may be sent now, and give back the rows that may not."""
        self.next_at = NEVER
        self._park_slow_calls(now)
        self._end_waits(now)
        while (call := self._next_call(now)) is not None:
            self._calls[call] = call
            self._parts.measures.begin_call()
            self._sink.submit(call)
        if self._rows:
            self._give_rows_back()

    def _end_waits(self, now: float) -> None:
        if self._undone and not self._calls:
            self._log.extendleft(sorted(self._undone, key=lambda w: (w.number, w.indexes[0]), reverse=True))
            self._undone.clear()
        if self._stopped and now >= self._resume_at:
            self._turns.extend(self._stopped)
            self._stopped.clear()
        if self._again:
            self._end_retries(now)

    def _end_retries(self, now: float) -> None:
        """Send events again whose time has come. Others come soon once the destination answers: positions wait."""
        if self._circuit.unavailable_since != self._unavailable_since:
            self._unavailable_since = self._circuit.unavailable_since
            soon = now + self._parts.spec.settings.circuit.probe_seconds
            self._again = sorted((min(at, soon), number, work) for at, number, work in self._again)
        while self._again and self._again[0][0] <= now:
            self._turns.append(heapq.heappop(self._again)[2])
        if self._again:
            self.next_at = min(self.next_at, self._again[0][0])

    def _next_call(self, now: float) -> SentCall | None:
        """Return the next call, or None if nothing may be sent now."""
        while (rows := self._rows_are_next(now)) is not None:
            permit = self._permit(now)
            if permit is None:
                break
            if call := self._row_call(permit, now) if rows else self._log_call(permit, now):
                self._rows_were_last = rows
                self._outcomes.limits.begin(len(call.events), replay=self._outcomes.is_replay)
                return call
            if permit.probe:
                self._circuit.unused(permit.term)
        if self._stopped:
            self.next_at = min(self.next_at, self._resume_at)
        return None

    def _rows_are_next(self, now: float) -> bool | None:
        """Return True if the next call is one of rows, False if it is one of the log, or None if there is none."""
        outcomes = self._outcomes
        if len(self._calls) >= outcomes.slots.limit or self._undone or not outcomes.may_send:
            return None
        log = self._log_waits
        rows = bool(self._rows) and self._row_calls < self._row_share
        if rows and not (log and self._rows_were_last):
            return True
        if log and outcomes.bound.has_capacity(now):
            return False
        if log:
            self.next_at = min(self.next_at, outcomes.bound.count_at)
        return True if rows else None

    def _permit(self, now: float) -> Permit | None:
        """Return the admission of the circuit and of the limits, or None, with ``next_at``."""
        wait = self._outcomes.limits.wait(now, replay=self._outcomes.is_replay)
        if wait <= 0:
            wait = self._circuit.admission_delay(now)
        if wait > 0:
            self.next_at = min(self.next_at, now + wait)
            return None
        return Permit(self._circuit.term, self._circuit.state != "closed")

    def _row_call(self, permit: Permit, now: float) -> SentCall | None:
        work = self._rows.popleft()
        if self._parts.clock.lease() >= work.until:
            self._give_back(work)
            return None
        most = 1 if permit.probe else self._outcomes.limits.room(now)
        if len(work.rows) > most:
            self._rows.appendleft(RowWork(work.rows[most:], work.until))
            work = RowWork(work.rows[:most], work.until)
        self._row_calls += 1
        attempt = work.rows[0].attempts + 1
        call = SentCall(work.events, work.until, attempt, self._parts.clock.monotonic(), permit=permit, work=(work,))
        # The leases began with the claim, ``LEASE_MARGIN_SECONDS`` before ``until``, and last for two of them more.
        self._watch(call, work.until + self._sink.timeout_seconds + LEASE_MARGIN_SECONDS)
        return call

    def _log_call(self, permit: Permit, now: float) -> SentCall | None:
        """Return a call of the log. Events that must not be sent become rows instead; None if none is left."""
        most = 1 if permit.probe else min(self._sink.max_batch, self._outcomes.limits.room(now))
        taken = self._take_batches(most) if self._sink.keeps_order else self._take_one(now, permit)
        works = [work for work in map(self._deliverable, taken) if work.indexes]
        if not works:
            return None
        parts = [work.events for work in works]
        events = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
        until = self._outcomes.until(events)
        self._log_calls += 1
        return SentCall(events, until, 0, self._parts.clock.monotonic(), permit=permit, work=works)

    def _take_batches(self, most: int) -> list[LogWork]:
        """Take the first batch, at most ``most`` events of it, and those that fit into the same call."""
        first = self._log.popleft()
        if len(first.indexes) > most:
            self._log.appendleft(LogWork(first.number, first.chunk, first.indexes[most:]))
            return [LogWork(first.number, first.chunk, first.indexes[:most])]
        taken, events, size = [first], len(first.indexes), first.chunk.size
        while self._log:
            work = self._log[0]
            events, size = events + len(work.indexes), size + work.chunk.size
            if events > most or size > CALL_BYTES:
                break
            taken.append(self._log.popleft())
        return taken

    def _take_one(self, now: float, permit: Permit) -> list[LogWork]:
        """Take the next event whose key is free and that need not wait, or None."""
        while (work := self._next_of_its_key(permit)) is not None:
            if not self._outcomes.must_wait(work.events[0], now):
                return [work]
            self._stopped.append(work)
            self._resume_at = now + RESUME_SECONDS
        return []

    def _next_of_its_key(self, permit: Permit) -> LogWork | None:
        """Return the next event whose key is free. Events that were probes in vain take turns with others as probes."""
        others = permit.probe and self._probed_were_last and (self._turns or self._log)
        self._probed_were_last = bool(self._probed) and not others
        if self._probed_were_last:
            return self._probed.popleft()
        if self._turns:
            return self._turns.popleft()
        while self._log:
            work = self._log.popleft()
            [event] = work.events
            if event.key is None or not self._outcomes.keyed(event):
                return work
            if event.key not in self._followers:
                self._followers[event.key] = deque()
                return work
            self._followers[event.key].append(work)
        return None

    def _end_turn(self, event: StoredEvent) -> None:
        """Give the turn to the next event of the key.

        A pass over all waiting events would cost the square of their number.
        """
        if event.key is None or event.key not in self._followers or not self._outcomes.keyed(event):
            return
        if followers := self._followers[event.key]:
            self._turns.append(followers.popleft())
        else:
            del self._followers[event.key]

    def _deliverable(self, work: LogWork) -> LogWork:
        """Make rows of the events that must not be delivered now, and return the others."""
        outcomes, events, held = self._outcomes, work.events, self._parts.leases.held
        if held is not self._held:
            self._held = held
            self._crashed = any(lease.crashes >= SUSPECT_CRASHES for lease in held.values())
        is_odd = any(map(DELIVER_AT, events)) or any(map(FAULT, events))
        if not is_odd and not self._crashed and not len(outcomes.blocked):
            return work
        left = [index for index in work.indexes if not outcomes.park_unless_deliverable(work.chunk, index)]
        if not left and not self._sink.keeps_order:
            self._end_turn(events[0])
        work.indexes = left
        return work

    # -- verdicts -----------------------------------------------------------------------------------------------

    def completed(self, ended: Call) -> None:
        """Apply the verdicts of a call that has ended.

        Raises ``LeaseLost`` if a lease ended before all of its events were handed over.
        """
        call = self._calls.pop(ended, None)
        if call is None:  # withdrawn
            return
        self._end_call()
        work = call.work[0]
        if isinstance(work, RowWork):
            self._rows_completed(work, call)
        else:
            self._log_calls -= 1
            self._log_completed(call)
        if call.permit.probe:
            self._circuit.unused(call.permit.term)

    def _end_call(self) -> None:
        self._outcomes.limits.end()
        self._parts.measures.end_call()

    def _rows_completed(self, work: RowWork, call: SentCall) -> None:
        self._row_calls -= not call.slow
        if work is self._suspect:
            self._suspect = None
        weight = min(WEIGHT, ROUND_WEIGHT / min(1 + self._row_calls, MOST_WEIGHED))
        self._call_seconds += (call.seconds - self._call_seconds) * weight
        if stopped := self._outcomes.rows_answered(work.rows, call):
            self._rows = deque(left for each in self._rows if (left := self._without(each, stopped)).rows)

    def _without(self, work: RowWork, stopped: Collection[str]) -> RowWork:
        """Give back the rows of ``work`` whose key has an earlier one that was claimed with them and not delivered."""
        behind = [row for row in work.rows if row.ordered and row.event.key in stopped]
        if behind:
            self._outcomes.give_back(behind)
        return RowWork([row for row in work.rows if row not in behind], work.until) if behind else work

    def _log_completed(self, call: SentCall) -> None:
        if call.verdicts is None:
            self._all_delivered(call)
            return
        if self._parts.clock.lease() >= call.until and any(isinstance(v, Unavailable) for v in call.verdicts):
            self._outcomes.until(call.events)
        verdicts = iter(call.verdicts)
        for work in call.work:
            assert isinstance(work, LogWork)  # noqa: S101 - a call has work of one kind
            self._answered(work, islice(verdicts, len(work.indexes)), call)

    def _all_delivered(self, call: SentCall) -> None:
        outcomes = self._outcomes
        outcomes.delivered(call.permit)
        outcomes.record_delivered(call.events, None, call.seconds)
        for work in call.work:
            assert isinstance(work, LogWork)  # noqa: S101
            if len(work.indexes) == len(work.chunk.events):
                outcomes.settler.done(work.chunk)
            else:
                for index in work.indexes:
                    outcomes.settler.done(work.chunk, index)
        if not self._sink.keeps_order:
            self._end_turn(call.events[0])

    def _answered(self, work: LogWork, verdicts: Iterator[Verdict], call: SentCall) -> None:
        """Settle events of the log one by one.

        The undelivered events of a key that becomes blocked wait for its row. Those that stay in flight are sent again.
        """
        outcomes, chunk = self._outcomes, work.chunk
        undone: list[int] = []
        for index, verdict in zip(work.indexes, verdicts, strict=True):
            event = chunk.events[index]
            if not isinstance(verdict, Delivered) and event.key in outcomes.blocked and outcomes.keyed(event):
                outcomes.park(chunk, index, "held")
            elif not outcomes.apply(chunk, index, verdict, call.permit, call.seconds):
                undone.append(index)
        if self._sink.keeps_order:
            if undone:
                self._undone.append(LogWork(work.number, chunk, undone))
        elif undone:
            self._send_again(work, call.began)
        else:
            self._end_turn(chunk.events[work.indexes[0]])

    def _send_again(self, work: LogWork, began: float) -> None:
        """Send an event again that stays in flight: after other events once the circuit admits it, or after a pause.

        If the destination answers other events meanwhile, this one becomes a row, so that no position waits for it.
        """
        spec, circuit, now = self._parts.spec, self._circuit, self._parts.clock.monotonic()
        if circuit.state != "closed":
            work.began = work.unavailable_since = None
            self._probed.append(work)
            return
        work.began = began if work.began is None else work.began
        answers_others = work.unavailable_since not in (None, circuit.unavailable_since)
        if answers_others and now - work.began >= spec.park_after_seconds:
            self._outcomes.park(work.chunk, work.indexes[0], "waiting", due_in=spec.settings.circuit.probe_seconds)
            self._end_turn(work.events[0])
            return
        if work.unavailable_since is None:
            work.unavailable_since = circuit.unavailable_since
        heapq.heappush(self._again, (now + circuit.retry_delay(now), next(self._number), work))

    # -- slow calls ---------------------------------------------------------------------------------------------

    def _park_slow_calls(self, now: float) -> None:
        """Make leased rows of the events whose calls have taken ``park_after_seconds``: no position waits for them."""
        if self._sink.keeps_order or not self._log_calls:
            return
        after = self._parts.spec.park_after_seconds
        for call in self._calls.values():
            if isinstance(work := call.work[0], RowWork):
                continue
            if now - call.began < after:
                self.next_at = min(self.next_at, call.began + after)
                return
            self._park_slow(call, work, now - call.began)

    def _park_slow(self, call: SentCall, work: LogWork, waited: float) -> None:
        outcomes, [index] = self._outcomes, work.indexes
        event = work.chunk.events[index]
        lease = new_row_lease(self._parts.db_time(ago=waited))
        left = max(0.0, self._sink.timeout_seconds - waited) + LEASE_MARGIN_SECONDS
        outcomes.park(work.chunk, index, "waiting", due_in=0.0, claims=1, lease=lease, lease_for=left)
        outcomes.expect(1)
        call.work, call.slow = (RowWork([ClaimedRow(event, outcomes.keyed(event), 0, 1, lease)], call.until),), True
        self._watch(call, self._parts.clock.lease() + left)
        self._log_calls -= 1
        self._end_turn(event)
