"""Relays, faults and people in any order: nothing is lost, repeated without a reason, out of order or stuck."""

from __future__ import annotations

import time

import pytest

from tests.simulation.__main__ import search

SECONDS = 20.0


@pytest.mark.fence("the new owner of a shard delivers an event while its key has rows")
def test_no_schedule_breaks_a_promise() -> None:
    count, seed, error = search(SECONDS, first=int(time.time()) % 1_000_000, clock=time.perf_counter)
    assert error is None, f"python -m tests.simulation 1 {seed}: {error!r}"
    assert count > 0
