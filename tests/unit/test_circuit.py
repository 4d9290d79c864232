"""The states of a circuit, and the reports that change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox_relay.domain.circuit import Circuit, CircuitPolicy

Step = Callable[[Circuit], object]
THREE = CircuitPolicy(open_after=3, probe_seconds=1.0, probe_max_seconds=4.0)


def fails(event: int, now: float, *, term: int | None = None) -> Step:
    """Return a step in which `event`, admitted in `term` (default: the current one), is answered with a failure."""
    return lambda circuit: circuit.failed(event, "down", now, circuit.term if term is None else term)


def is_down(event: int, now: float, *, at_once: bool = True, retry_after: float = 0.0, term: int | None = None) -> Step:
    """Return a step in which the destination cannot accept `event`."""

    def step(circuit: Circuit) -> None:
        admitted_in = circuit.term if term is None else term
        circuit.unavailable(event, "down", now, admitted_in, at_once=at_once, retry_after=retry_after)

    return step


def admitted(now: float) -> Step:
    """Return a step in which an event is admitted at `now`."""

    def step(circuit: Circuit) -> None:
        assert circuit.admission_delay(now) == 0.0

    return step


def waits(now: float, seconds: float) -> Step:
    """Return a step in which no event is admitted at `now`, for `seconds`."""

    def step(circuit: Circuit) -> None:
        assert circuit.admission_delay(now) == pytest.approx(seconds)

    return step


def works(circuit: Circuit) -> None:
    """Deliver an event admitted in the current term."""
    circuit.delivered(circuit.term)


def works_late(circuit: Circuit) -> None:
    """Deliver an event admitted in the first term."""
    circuit.delivered(0)


def unused(circuit: Circuit) -> None:
    """Return the unused probe."""
    circuit.unused(circuit.term)


def asked(circuit: Circuit) -> None:
    """Ask for a probe that is waited for."""
    assert circuit.probe_now()


def asked_in_vain(circuit: Circuit) -> None:
    """Ask for a probe when none is waited for."""
    assert not circuit.probe_now()


OPENED = (is_down(1, 10.0),)
PROBING = (*OPENED, admitted(11.0))
CIRCUITS: dict[str, tuple[tuple[Step, ...], str]] = {
    "everything is admitted while closed": ((admitted(0.0), admitted(0.0), admitted(0.0)), "closed"),
    "failures below the bound leave it closed": ((fails(1, 0.0), fails(2, 0.0), admitted(0.0)), "closed"),
    "failures of one event count once": (tuple(fails(1, 0.0) for _ in range(9)), "closed"),
    "failures of different events open it": ((fails(1, 0.0), fails(2, 0.0), fails(3, 0.0)), "open"),
    "a delivery between failures resets the count": (
        (fails(1, 0.0), fails(2, 0.0), works, fails(3, 0.0), fails(4, 0.0)),
        "closed",
    ),
    "a destination that is down opens it at once": (OPENED, "open"),
    "no event is admitted before the probe": ((*OPENED, waits(10.0, 1.0), waits(10.75, 0.25)), "open"),
    "the first to ask then is the probe": (PROBING, "half-open"),
    "one probe at a time": ((*PROBING, waits(11.0, 1.0), waits(99.0, 1.0)), "half-open"),
    "an unused probe goes to the next event": ((*PROBING, unused, admitted(11.0), waits(11.0, 1.0)), "half-open"),
    "a probe that is delivered closes it": ((*PROBING, works, admitted(11.0), admitted(11.0)), "closed"),
    "a probe that fails opens it for twice as long": ((*PROBING, fails(1, 11.5), waits(11.5, 2.0)), "open"),
    "the interval doubles up to its bound": (
        (*PROBING, fails(1, 12.0), admitted(14.0), fails(1, 14.0), admitted(18.0), fails(1, 18.0), waits(18.0, 4.0)),
        "open",
    ),
    "a delivery resets the interval": (
        (*PROBING, fails(1, 12.0), admitted(14.0), works, is_down(2, 20.0), waits(20.0, 1.0)),
        "open",
    ),
    "a requested time is granted": (
        (is_down(1, 10.0, retry_after=30.0), waits(39.0, 1.0), admitted(40.0)),
        "half-open",
    ),
    "a shorter requested time does not shorten the interval": (
        (is_down(1, 10.0, retry_after=0.1), waits(10.5, 0.5)),
        "open",
    ),
    "results of requests sent before it opened change nothing": (
        (*OPENED, fails(2, 10.5, term=0), is_down(3, 10.9, term=0), waits(10.9, 0.1), admitted(11.0)),
        "half-open",
    ),
    "a failure from before is not the probe's": (
        (*PROBING, fails(2, 11.5, term=0), waits(11.5, 1.0), works, admitted(11.6)),
        "closed",
    ),
    "a delivery from before is not the probe's": ((*PROBING, works_late, waits(11.5, 1.0)), "half-open"),
    "a delivery from before does not shorten a requested time": (
        (is_down(1, 10.0, retry_after=30.0), works_late, waits(12.0, 28.0)),
        "open",
    ),
    "a probe that a person asks for is sent at once": ((*OPENED, asked, admitted(10.1), waits(10.1, 1.0)), "half-open"),
    "also before a requested time": (
        (is_down(1, 10.0, retry_after=30.0), asked, admitted(10.1)),
        "half-open",
    ),
    "if it fails, the interval doubles as usual": (
        (*OPENED, asked, admitted(10.1), fails(1, 10.2), waits(10.2, 2.0)),
        "open",
    ),
    "a request changes nothing while a probe is under way": ((*PROBING, asked_in_vain, waits(11.0, 1.0)), "half-open"),
    "or while it is closed": ((asked_in_vain, admitted(0.0)), "closed"),
    "one event that is unavailable for half a minute opens it": (
        tuple(is_down(1, now, at_once=False) for now in (0.0, 15.0, 30.0)),
        "open",
    ),
    "before that it stays closed": (tuple(is_down(1, now, at_once=False) for now in (0.0, 15.0, 29.9)), "closed"),
    "a delivery of another event begins the time again": (
        (is_down(1, 0.0, at_once=False), works, *(is_down(1, now, at_once=False) for now in (15.0, 30.0, 44.9))),
        "closed",
    ),
    "so does a failure, since the destination answered": (
        (is_down(1, 0.0, at_once=False), fails(2, 10.0), *(is_down(1, now, at_once=False) for now in (15.0, 44.9))),
        "closed",
    ),
    "failures from before a recovery do not count after it": (
        (*PROBING, works, fails(2, 12.0, term=0), fails(3, 12.0, term=0), fails(4, 12.0, term=0)),
        "closed",
    ),
}


@pytest.mark.parametrize(("steps", "state"), CIRCUITS.values(), ids=CIRCUITS.keys())
def test_circuit(steps: tuple[Step, ...], state: str) -> None:
    circuit = Circuit(THREE)
    for step in steps:
        step(circuit)
    assert circuit.state == state


def test_attempts_at_a_destination_that_answers_nothing_grow_rare_until_it_opens() -> None:
    circuit, now, times = Circuit(CircuitPolicy()), 100.0, list[float]()
    while circuit.state == "closed":
        circuit.unavailable(1, "down", now, circuit.term, at_once=False)
        times.append(now - 100.0)
        now += circuit.retry_delay(now)
    assert times == [0, 1, 2, 4, 8, 16, 30]
    assert circuit.retry_delay(now) == 1.0
