"""Rows that were claimed ahead of their calls: they go back once they may not be sent soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from outbox_relay.domain.circuit import Circuit, CircuitPolicy
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.dispatch import START_SECONDS, Dispatcher
from outbox_relay.relay.measures import SinkMeasures
from outbox_relay.relay.outcomes import LEASE_MARGIN_SECONDS, Outcomes
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.threads import LATE


class Limits:
    """The limits of a sink, which outlast a session."""

    def __init__(self) -> None:
        self.seconds, self.in_flight = 0.0, 0

    def wait(self, _now: float, *, replay: bool) -> float:
        """Return how long a call has to wait."""
        del replay
        return self.seconds

    def room(self, _now: float) -> int:
        """Return the number of events that a call may have."""
        return 1000

    def begin(self, _events: int, *, replay: bool) -> None:
        """Count a call."""
        del replay
        self.in_flight += 1

    def end(self) -> None:
        """Count a call less."""
        self.in_flight -= 1


class Waiting:
    """A dispatcher with three rows, for which no slot is free, and what it sends and gives back."""

    def __init__(self) -> None:
        self.limits, self.slots, self.sent = Limits(), SimpleNamespace(limit=0), list[Call]()
        self.now, self.given_back = 100.0, list[ClaimedRow]()
        self.circuit = Circuit(CircuitPolicy(open_after=1))
        self.leases = SimpleNamespace(serving=True, held={}, rows_until=0.0)
        clock = SimpleNamespace(lease=lambda: self.now, monotonic=lambda: self.now)
        sink = SimpleNamespace(keeps_order=False, max_batch=1, timeout_seconds=1.0, submit=self.sent.append)
        outcomes = SimpleNamespace(
            parts=SimpleNamespace(sink=sink, clock=clock, leases=self.leases, measures=SinkMeasures()),
            circuit=self.circuit,
            slots=self.slots,
            limits=self.limits,
            is_replay=False,
            may_send=True,
            give_back=self.given_back.extend,
        )
        self.dispatcher = Dispatcher(cast("Any", outcomes))
        self.rows = [ClaimedRow(an_event(), False, 0, 1, uuid4()) for _ in range(3)]
        self.dispatcher.add_rows(self.rows, self.now + LEASE_MARGIN_SECONDS)
        self.dispatcher.submit(self.now)
        assert not self.given_back

    def submit(self) -> None:
        """Hand over what may be sent now."""
        self.dispatcher.submit(self.now)


@pytest.mark.fence("rows claimed ahead wait until their leases lapse, or are sent after the circuit opened")
@pytest.mark.parametrize("change", ["circuit", "pause"])
def test_rows_claimed_ahead_are_not_sent_after_a_change(change: str) -> None:
    """Goes red when they wait for a slot although the circuit has opened or the sink is paused."""
    waiting = Waiting()
    if change == "circuit":
        waiting.circuit.unavailable(1, "down", waiting.now, waiting.circuit.term, at_once=True)
        assert waiting.circuit.state == "open"
    else:
        waiting.leases.serving = False
    waiting.submit()
    assert waiting.given_back == waiting.rows


@pytest.mark.fence("rows claimed ahead wait until their leases lapse, or are sent after the circuit opened")
def test_rows_in_hand_go_back_while_every_call_hangs() -> None:
    """Goes red when rows wait in memory until their leases lapse, while another relay could deliver them."""
    waiting = Waiting()
    assert waiting.dispatcher.next_at == waiting.now + START_SECONDS
    waiting.now = waiting.dispatcher.next_at
    waiting.submit()
    assert waiting.given_back == waiting.rows


@pytest.mark.fence("rows that were claimed without a limit across relays are sent beyond one")
def test_a_limit_counts_from_the_moment_at_which_it_is_known() -> None:
    waiting = Waiting()
    waiting.slots.limit, waiting.limits.seconds = 3, 0.1
    waiting.submit()
    assert waiting.sent == []
    waiting.limits.seconds = 0.0
    waiting.submit()
    assert len(waiting.sent) == 3


@pytest.mark.fence("calls of an ended session still count in the limits of the sink")
def test_the_calls_of_a_session_that_ends_count_no_more() -> None:
    waiting = Waiting()
    waiting.slots.limit = 3
    waiting.submit()
    assert waiting.limits.in_flight == 3
    waiting.dispatcher.withdrawn()
    assert waiting.limits.in_flight == 0


@pytest.mark.fence("a row is sent before an earlier one of its key that came back because a lease had ended")
def test_a_row_that_no_client_got_stops_the_later_ones_of_its_key() -> None:
    """Goes red when those that were claimed with it are sent before it is claimed again."""
    row, back = ClaimedRow(an_event("a"), False, 0, 1, uuid4()), list[ClaimedRow]()

    def send_back(row: ClaimedRow, _update: object) -> None:
        back.append(row)

    outcomes = SimpleNamespace(awaited=1, keyed=bool, settler=SimpleNamespace(send_back=send_back))
    late = SimpleNamespace(verdicts=[LATE])
    assert Outcomes.rows_answered(cast("Any", outcomes), [row], cast("Any", late)) == {"a"}
    assert back == [row]
