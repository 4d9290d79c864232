"""Verdicts, and the settlements decided from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.outcomes import (
    LAST_ERROR_CHARS,
    DeadLetter,
    Failed,
    Refused,
    RetryLater,
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


@pytest.mark.parametrize(("before", "dead"), [(0, False), (3, False), (4, True), (9, True)])
def test_last_attempt_that_fails_is_dead(before: int, dead: bool) -> None:
    settlement = decide(before, Failed("no", 500), POLICY, 0.0)
    assert isinstance(settlement, DeadLetter if dead else RetryLater)
    assert settlement == (DeadLetter(before + 1, "no", 500) if dead else RetryLater(2.0**before, before + 1, "no", 500))


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
    assert isinstance(settlement, RetryLater)
    assert settlement.attempts == attempts
    assert settlement.delay_seconds >= 7.0


@given(st.text(max_size=3 * LAST_ERROR_CHARS))
def test_reason_is_kept_as_one_short_printable_line(reason: str) -> None:
    kept = clip(reason)
    assert len(kept) <= LAST_ERROR_CHARS
    assert kept.isprintable()
    assert kept[: LAST_ERROR_CHARS - 1] == clip(reason[: LAST_ERROR_CHARS - 1])
    for verdict in (Failed(reason), Refused(reason), Unavailable(reason)):
        settlement = decide(0, verdict, POLICY, 0.0)
        assert isinstance(settlement, RetryLater | DeadLetter | StandStill)
        assert settlement.error == kept
