"""The times at which the loops of a process look."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest
import structlog

from outbox_relay.domain.window import Tick
from outbox_relay.postgres.log import TickResult
from outbox_relay.relay.ticks import PACE_SECONDS, Ticks

LOOPS = range(50)


def _result(seq: int) -> TickResult:
    return TickResult(Tick(seq, f"{seq}:{seq}:", seq), "1", datetime.now(UTC), 0)


def test_looks_of_many_loops_are_no_further_apart_while_all_take_the_same_ticks() -> None:
    now = 0.0
    ticks = Ticks(lambda: _result(0), cast("Any", None), structlog.get_logger(), clock=lambda: now)
    for seq in range(1, 5):
        for loop in LOOPS:
            ticks.expect(loop, lambda: None, _result(seq - 1), rests=False)
        ticks.publish(_result(seq), 0.0)
        times = [ticks.pace(now) for _ in LOOPS]
        assert times[0] == pytest.approx(now + PACE_SECONDS)
        assert times[-1] == pytest.approx(now + len(LOOPS) * PACE_SECONDS)
        now = times[0]
