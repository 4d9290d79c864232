"""The delays of a retry policy, and their bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.outcomes import RetryPolicy

NOISE = st.floats(-1.0, 1.0)
POLICIES = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 1000),
    base_seconds=st.floats(0.001, 3600.0),
    max_seconds=st.floats(0.001, 1e6),
    jitter=st.floats(0.0, 1.0),
)


@given(POLICIES, st.integers(1, 100_000), NOISE)
def test_delay_is_base_doubled_capped_and_jittered(policy: RetryPolicy, attempts: int, noise: float) -> None:
    plain = min(policy.base_seconds * 2 ** min(attempts - 1, 62), policy.max_seconds)
    delay = policy.delay_seconds(attempts, noise)
    assert plain * (1 - policy.jitter) * 0.999 <= delay <= plain * (1 + policy.jitter) * 1.001
    assert 0.0 <= delay <= policy.max_seconds * (1 + policy.jitter) * 1.001
