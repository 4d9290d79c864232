"""The share of one relay in the limits of a sink, and the turns of a sink and its replays."""

from __future__ import annotations

from typing import Any

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_limits import SinkLimits, in_flight_share
from outbox_relay.relay.keeper import fair_quota
from outbox_relay.relay.limits import NO_LIMIT, WAIT_SECONDS, RateShare
from outbox_relay.relay.sink_leases import Lease, SinkLeases


def a_share(shards: int = SHARDS, *, relays: int = 1, **limits: Any) -> RateShare:
    """Return the share of the owner of some shards."""
    leases = SinkLeases("s", 1, SinkLimits(**limits))
    leases.grant({shard: Lease(1) for shard in range(shards)})
    leases.observe_relays(relays, renewed=True)
    return RateShare(leases, 0.0)


def test_without_limits_nothing_waits() -> None:
    limits = a_share()
    assert (limits.wait(0.0), limits.room(0.0)) == (0.0, NO_LIMIT)


def test_relays_have_the_total_together_and_each_has_one() -> None:
    for total in range(1, 70):
        for relays in range(1, min(total, SHARDS) + 1):
            shares = [in_flight_share(total, fair_quota(relays, before), relays) for before in range(relays)]
            assert sum(shares) <= total
            assert min(shares) >= 1


def test_a_rate_is_that_of_the_owned_shards_and_calls_spend_it() -> None:
    limits, sent = a_share(SHARDS // 2, rate_per_second=100.0), 0
    for step in range(1, 1001):
        while limits.wait(step / 100) == 0.0:
            limits.begin(1)
            limits.end()
            sent += 1
    assert 490 <= sent <= 510


def test_calls_in_flight_are_counted_until_they_end() -> None:
    limits = a_share(max_in_flight_total=2)
    for _ in range(2):
        assert limits.wait(0.0) == 0.0
        limits.begin(1)
    assert limits.wait(0.0) == WAIT_SECONDS
    limits.end()
    assert limits.wait(0.0) == 0.0


def test_a_replay_that_waits_gets_every_fourth_call() -> None:
    limits, calls = a_share(max_in_flight_total=1), list[bool]()
    limits.begin(1)
    for step in range(200):
        now = step * WAIT_SECONDS
        limits.end()
        for replay in (False, True):
            if limits.wait(now, replay=replay) == 0.0:
                limits.begin(1, replay=replay)
                calls.append(replay)
                break
        else:
            limits.begin(1)
        for replay in (False, True):
            limits.wait(now, replay=replay)
    assert 40 <= sum(calls) <= 60


def test_events_that_a_limit_holds_up_are_handed_over_with_their_shards() -> None:
    limits = a_share(rate_per_second=10.0)
    assert not limits.stall(10)
    assert limits.stall(11)
    assert limits.may_release(1.0, 0.0)
