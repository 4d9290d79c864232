"""Verdicts and what follows from them: the decision, the bounds of every delay, the circuit's states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.policy import (
    DELIVERED,
    DONE,
    LAST_ERROR_CHARS,
    Circuit,
    CircuitPolicy,
    Dead,
    Failed,
    Refused,
    Retry,
    RetryPolicy,
    StandStill,
    Unavailable,
    clip,
    decide,
)

POLICY = RetryPolicy(attempts=5, base_seconds=1.0, max_seconds=60.0, jitter=0.2)
NOISE = st.floats(-1.0, 1.0)
POLICIES = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 1000),
    base_seconds=st.floats(0.001, 3600.0),
    max_seconds=st.floats(0.001, 1e6),
    jitter=st.floats(0.0, 1.0),
)
ASKED = st.floats(0.0, 1e6)


# -- decide -------------------------------------------------------------------------------------------------------


def test_delivered_is_done_whatever_was_counted() -> None:
    assert decide(4, DELIVERED, POLICY, 0.0) is DONE


def test_failure_is_an_attempt_and_is_tried_again() -> None:
    assert decide(1, Failed("500", 500), POLICY, 0.0) == Retry(2.0, 2, "500", 500)


@pytest.mark.parametrize(("before", "dead"), [(0, False), (3, False), (4, True), (9, True)])
def test_last_attempt_that_fails_is_dead(before: int, dead: bool) -> None:
    settlement = decide(before, Failed("no", 500), POLICY, 0.0)
    assert isinstance(settlement, Dead if dead else Retry)
    assert settlement == (Dead(before + 1, "no", 500) if dead else Retry(2.0**before, before + 1, "no", 500))


def test_refused_is_dead_at_once() -> None:
    assert decide(0, Refused("too large", 413), POLICY, 0.0) == Dead(1, "too large", 413)


@given(st.integers(0, 10_000), POLICIES, NOISE)
def test_unavailable_counts_no_attempt_however_often(attempts: int, policy: RetryPolicy, noise: float) -> None:
    assert decide(attempts, Unavailable("down", 503, 7.0), policy, noise) == StandStill("down", 7.0)


@given(st.integers(0, 998), NOISE, ASKED)
def test_delay_that_was_asked_for_is_never_undercut(attempts: int, noise: float, asked: float) -> None:
    settlement = decide(attempts, Failed("busy", 429, asked), RetryPolicy(attempts=1000), noise)
    assert isinstance(settlement, Retry)
    assert settlement.delay_seconds >= asked
    assert settlement.delay_seconds >= RetryPolicy().delay_seconds(attempts + 1, noise)


@given(st.text(max_size=3 * LAST_ERROR_CHARS))
def test_reason_is_kept_as_one_short_printable_line(reason: str) -> None:
    kept = clip(reason)
    assert len(kept) <= LAST_ERROR_CHARS
    assert kept.isprintable()
    assert kept[: LAST_ERROR_CHARS - 1] == clip(reason[: LAST_ERROR_CHARS - 1])
    for verdict in (Failed(reason), Refused(reason), Unavailable(reason)):
        settlement = decide(0, verdict, POLICY, 0.0)
        assert isinstance(settlement, Retry | Dead | StandStill)
        assert settlement.error == kept


def test_printable_reason_is_kept_as_it_stands() -> None:
    assert clip("connection refused: ümläut, 日本") == "connection refused: ümläut, 日本"
    assert clip("x" * LAST_ERROR_CHARS) == "x" * LAST_ERROR_CHARS
    assert clip("x" * (LAST_ERROR_CHARS + 1)) == "x" * (LAST_ERROR_CHARS - 1) + "…"


# -- delays -------------------------------------------------------------------------------------------------------


@given(POLICIES, st.integers(1, 100_000), NOISE)
def test_delay_is_base_doubled_capped_and_jittered(policy: RetryPolicy, attempts: int, noise: float) -> None:
    plain = min(policy.base_seconds * 2 ** min(attempts - 1, 62), policy.max_seconds)
    delay = policy.delay_seconds(attempts, noise)
    assert plain * (1 - policy.jitter) * 0.999 <= delay <= plain * (1 + policy.jitter) * 1.001
    assert 0.0 <= delay <= policy.max_seconds * (1 + policy.jitter) * 1.001


@given(POLICIES, st.integers(1, 100), NOISE)
def test_delay_never_shrinks_from_one_attempt_to_the_next(policy: RetryPolicy, attempts: int, noise: float) -> None:
    assert policy.delay_seconds(attempts, noise) <= policy.delay_seconds(attempts + 1, noise)


@given(POLICIES, st.integers(1, 100))
def test_noise_reaches_both_ends_of_the_jitter(policy: RetryPolicy, attempts: int) -> None:
    middle = policy.delay_seconds(attempts, 0.0)
    assert policy.delay_seconds(attempts, -1.0) == pytest.approx(middle * (1 - policy.jitter))
    assert policy.delay_seconds(attempts, 1.0) == pytest.approx(middle * (1 + policy.jitter))


def test_default_policy_tries_for_about_eighteen_hours() -> None:
    policy = RetryPolicy()
    hours = sum(policy.delay_seconds(n, 0.0) for n in range(1, policy.attempts)) / 3600
    assert 17 < hours < 19


# -- circuit ------------------------------------------------------------------------------------------------------

Step = Callable[[Circuit], object]
THREE = CircuitPolicy(open_after=3, probe_seconds=1.0, probe_max_seconds=4.0)


def fails(event: int, now: float, *, at_once: bool = False, retry_after: float | None = None) -> Step:
    """``event`` comes back at ``now``, undelivered."""
    return lambda circuit: circuit.failed(event, "down", now, at_once=at_once, retry_after=retry_after)


def admitted(now: float) -> Step:
    """An event is admitted at ``now``."""

    def step(circuit: Circuit) -> None:
        assert circuit.admits(now) == 0.0

    return step


def waits(now: float, seconds: float) -> Step:
    """Nothing is admitted at ``now``, and ``seconds`` are to be waited."""

    def step(circuit: Circuit) -> None:
        assert circuit.admits(now) == pytest.approx(seconds)

    return step


def works(circuit: Circuit) -> None:
    """An event is delivered."""
    circuit.delivered()


def unused(circuit: Circuit) -> None:
    """The probe was not needed."""
    circuit.unused()


OPENED = (fails(1, 10.0, at_once=True),)
PROBING = (*OPENED, admitted(11.0))
CIRCUITS: dict[str, tuple[tuple[Step, ...], str]] = {
    "everything is admitted while closed": ((admitted(0.0), admitted(0.0), admitted(0.0)), "closed"),
    "failures below the bound leave it closed": ((fails(1, 0.0), fails(2, 0.0), admitted(0.0)), "closed"),
    "failures of one event count once": (tuple(fails(1, 0.0) for _ in range(9)), "closed"),
    "failures of different events open it": ((fails(1, 0.0), fails(2, 0.0), fails(3, 0.0)), "open"),
    "a delivery between failures begins the count anew": (
        (fails(1, 0.0), fails(2, 0.0), works, fails(3, 0.0), fails(4, 0.0)),
        "closed",
    ),
    "a destination that is down opens it at once": (OPENED, "open"),
    "nothing is admitted before the probe": ((*OPENED, waits(10.0, 1.0), waits(10.75, 0.25)), "open"),
    "the first to ask then is the probe": (PROBING, "half-open"),
    "one probe at a time": ((*PROBING, waits(11.0, 1.0), waits(99.0, 1.0)), "half-open"),
    "a probe that was not needed is for the next": ((*PROBING, unused, admitted(11.0), waits(11.0, 1.0)), "half-open"),
    "a probe that is delivered closes it": ((*PROBING, works, admitted(11.0), admitted(11.0)), "closed"),
    "a probe that fails opens it for twice as long": ((*PROBING, fails(1, 11.5), waits(11.5, 2.0)), "open"),
    "the distance doubles up to its bound": (
        (*PROBING, fails(1, 12.0), admitted(14.0), fails(1, 14.0), admitted(18.0), fails(1, 18.0), waits(18.0, 4.0)),
        "open",
    ),
    "a delivery brings the distance back": (
        (*PROBING, fails(1, 12.0), admitted(14.0), works, fails(2, 20.0, at_once=True), waits(20.0, 1.0)),
        "open",
    ),
    "what was under way when it opened moves nothing": (
        (*OPENED, fails(2, 10.5), fails(3, 10.9, at_once=True), waits(10.9, 0.1), admitted(11.0)),
        "half-open",
    ),
    "a destination that asks for time gets it": (
        (fails(1, 10.0, at_once=True, retry_after=30.0), waits(39.0, 1.0), admitted(40.0)),
        "half-open",
    ),
    "less time than its own distance is not given": (
        (fails(1, 10.0, at_once=True, retry_after=0.1), waits(10.5, 0.5)),
        "open",
    ),
    "a late delivery closes it too": ((*OPENED, works, admitted(10.0)), "closed"),
}


@pytest.mark.parametrize(("steps", "state"), CIRCUITS.values(), ids=CIRCUITS.keys())
def test_circuit(steps: tuple[Step, ...], state: str) -> None:
    circuit = Circuit(THREE)
    for step in steps:
        step(circuit)
    assert circuit.state == state


def test_circuit_keeps_the_last_reason_for_people() -> None:
    circuit = Circuit(THREE)
    circuit.failed(1, "first\nline", 0.0, at_once=False)
    assert circuit.last_error == "first line"
