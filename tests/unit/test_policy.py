"""Verdicts and what follows from them: the decision, and the bounds of every delay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.outcomes import (
    DELIVERED,
    DONE,
    LAST_ERROR_CHARS,
    Attempt,
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
    settlement = decide(attempts, Unavailable("down", 503, 7.0), policy, noise)
    assert isinstance(settlement, StandStill)
    assert (settlement.error, settlement.status) == ("down", 503)
    assert settlement.retry_after_seconds is not None
    assert settlement.retry_after_seconds >= 7.0


@given(st.integers(0, 10_000), POLICIES, NOISE)
def test_trouble_of_a_part_waits_and_counts_no_attempt(attempts: int, policy: RetryPolicy, noise: float) -> None:
    settlement = decide(attempts, Unavailable("unknown topic", None, 7.0, part="topic a"), policy, noise)
    assert isinstance(settlement, Retry)
    assert settlement.attempts == attempts
    assert settlement.delay_seconds >= 7.0


def test_trouble_of_a_part_that_names_no_time_waits_for_the_base() -> None:
    assert decide(3, Unavailable("denied", part="topic a"), POLICY, 1.0) == Retry(1.0, 3, "denied")


def test_what_stands_behind_a_refused_event_waits_and_counts_no_attempt() -> None:
    assert decide(3, Unavailable("refused", behind=True), POLICY, 1.0) == Retry(1.0, 3, "refused")


def test_what_is_kept_of_an_attempt_goes_with_every_settlement() -> None:
    kept = Attempt("http_500", 0.1, "oops")
    for verdict in (Failed("no", 500, None, kept), Refused("no", 500, kept), Unavailable("no", 500, None, kept)):
        settlement = decide(0, verdict, POLICY, 0.0)
        assert isinstance(settlement, Retry | Dead | StandStill)
        assert settlement.attempt is kept


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
