"""The share of one relay in the limits of a sink: what may begin with the shards that it owns."""

from __future__ import annotations

import asyncio
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits, TokenBucket, in_flight_share, spread_of
from outbox_relay.relay import shared_limits
from outbox_relay.relay.leases import fair_quota
from outbox_relay.relay.shared_limits import Admission, SharedLimits
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.relay.turns import Turns

SECOND = 1.0


class Share:
    """A relay with ``shards`` of a sink. Its clock goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: SinkLimits, shards: int = SHARDS) -> None:
        self.now = 1000.0
        monkeypatch.setattr(shared_limits, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(shared_limits, "LOOK_SECONDS", 0.0)
        self.leases = SinkLeases("s", 1, limits)
        self.limits = SharedLimits(self.leases)
        self.own(shards)

    def own(self, shards: int) -> None:
        """Own that many shards."""
        self.leases.replace(dict.fromkeys(range(shards), Lease(1, 1e12, 0)))

    def ask(self, source: Any = "log", most: int = 1) -> asyncio.Task[Admission]:
        """Ask for an admission."""
        return asyncio.create_task(self.limits.admit(source, most))

    async def goes_on(self, seconds: float) -> None:
        """Let time pass, in small steps."""
        for _ in range(max(1, round(seconds * 100))):
            self.now += min(seconds, 0.01)
            await turn()


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def begun(requests: list[asyncio.Task[Admission]]) -> int:
    """Return the number of requests that have begun."""
    return sum(request.done() for request in requests)


def end(requests: list[asyncio.Task[Admission]]) -> None:
    """End the requests that wait."""
    for request in requests:
        request.cancel()


# -- shares -----------------------------------------------------------------------------------------------------------


def test_fair_shares_of_the_requests_in_flight_are_never_more_than_the_total() -> None:
    """The fence: goes red when a share is rounded, or when one request for each relay comes on top of it."""
    for relays, total in product(range(1, SHARDS + 1), (*range(1, 130), 1000, 100_000)):
        shares = [in_flight_share(total, fair_quota(relays, before), relays) for before in range(relays)]
        assert min(shares) >= 1
        assert sum(shares) <= max(total, relays)
        assert sum(shares) > total - relays


@pytest.mark.parametrize("shards", [(61, 1, 1, 1), (64, 0, 0, 0), (40, 24, 0, 0), (16, 16, 16, 16)])
def test_uneven_shares_are_never_more_than_the_total(shards: tuple[int, ...]) -> None:
    for total in range(4, 300):
        assert sum(in_flight_share(total, each, len(shards)) for each in shards) <= total


def test_tokens_are_earned_by_the_rate_and_kept_for_half_a_second() -> None:
    bucket = TokenBucket(0.0)
    assert bucket.fill(10.0, 0.05) == 0
    assert bucket.fill(10.0, 0.35) == 3
    bucket.add(-3)
    assert bucket.fill(10.0, 0.45) == 1
    assert bucket.fill(10.0, 100.0) == 6
    bucket.add(100)
    assert bucket.fill(10.0, 99.0) == 6
    assert TokenBucket(0.0).fill(0.01, 1e6) == 1


# -- turns ------------------------------------------------------------------------------------------------------------


async def test_each_source_comes_in_turn_and_the_log_twice_as_often() -> None:
    turns = Turns()
    for source in ("log", "parked", "replay") * 4:
        turns.add(cast("Any", source), {"log": 1, "parked": 2, "replay": 3}[source])
    assert [turns.next().most for _ in range(8)] == [1, 2, 1, 3, 1, 2, 1, 3]
    assert [turns.next().most for _ in range(4)] == [2, 3, 2, 3]
    assert not turns
    with pytest.raises(LookupError):
        turns.next()


# -- the rate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "expected"), [(64, 100), (32, 50), (1, 2), (0, 0)])
async def test_a_relay_sends_the_share_of_its_shards(
    monkeypatch: pytest.MonkeyPatch, shards: int, expected: int
) -> None:
    """The fence: goes red when a relay sends by the rate of all."""
    share = Share(monkeypatch, SinkLimits(100.0), shards)
    requests = [share.ask() for _ in range(200)]
    await share.goes_on(SECOND)
    assert expected - 1 <= begun(requests) <= expected
    end(requests)


async def test_the_share_is_that_of_the_shards_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when a relay that hands shards over sends for them until they are gone."""
    share = Share(monkeypatch, SinkLimits(100.0, 10))
    share.leases.set_quota(32)
    share.leases.observe_relays(2, renewed=True)
    assert (share.limits.rate, share.limits.free) == (50.0, 5)
    share.leases.stop()  # what is in hand is sent before all shards go
    assert (share.limits.rate, share.limits.free) == (100.0, 9)


async def test_a_batch_gets_the_tokens_that_are_there_and_gives_the_rest_back(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(monkeypatch, SinkLimits(100.0))
    share.now += 0.045
    admission = await share.limits.admit("log", 10)
    assert admission.events == 4
    waiting = share.ask()
    await turn()
    assert not waiting.done()
    share.limits.refund(admission, 3)
    assert (await asyncio.wait_for(waiting, 1)).events == 1


async def test_a_cancelled_request_leaves_its_tokens_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(monkeypatch, SinkLimits(100.0, 1))
    first, second = share.ask(most=5), share.ask()
    await turn()
    share.now += 0.015
    share.limits._serve()  # pyright: ignore[reportPrivateUsage]
    first.cancel()
    assert (await asyncio.wait_for(second, 1)).events == 1
    assert first.cancelled()


async def test_a_limit_that_is_removed_lets_all_go(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(monkeypatch, SinkLimits(0.01))
    requests = [share.ask() for _ in range(5)]
    await turn()
    assert (begun(requests), share.limits.waiting) == (0, 5)
    share.leases.limits = NO_LIMITS
    await asyncio.wait_for(asyncio.gather(*requests), 1)
    assert not share.limits.active


# -- requests in flight -----------------------------------------------------------------------------------------------


async def test_no_more_requests_begin_than_the_share_and_an_ended_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share = Share(monkeypatch, SinkLimits(None, 7), 32)
    share.leases.observe_relays(2, renewed=True)
    requests = [share.ask() for _ in range(6)]
    await turn()
    assert begun(requests) == 3
    requests[0].result().end()
    requests[0].result().end()  # once
    await turn()
    assert begun(requests) == 4
    share.own(0)
    for request in requests[1:4]:
        request.result().end()
    await turn()
    assert begun(requests) == 4
    share.own(1)
    await turn()
    assert begun(requests) == 5
    end(requests)


async def test_shards_stay_until_the_requests_in_flight_fit_those_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fence: goes red when the next owner begins its share while the old one has all of it in flight."""
    share = Share(monkeypatch, SinkLimits(None, 10))
    admissions = [await share.limits.admit("log") for _ in range(10)]
    share.leases.observe_relays(2, renewed=True)
    share.leases.set_quota(32)
    for admission in admissions[:5]:
        assert not share.limits.may_release(SECOND)
        admission.end()
    assert share.limits.may_release(SECOND)
    share.leases.stop()
    assert not share.limits.may_release(SECOND)
    share.now += SECOND  # those that are left last longer than their time limit
    assert share.limits.may_release(SECOND)
    assert not share.limits.may_release(SECOND)


# -- shards that would take long --------------------------------------------------------------------------------------


async def test_shards_are_handed_over_with_events_that_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, total = Share(monkeypatch, SinkLimits(20.0), 32), Share(monkeypatch, SinkLimits(None, 2))
    assert [rate.limits.stall(events) for events in (10, 11)] == [False, True]
    assert rate.limits.soon(1000) == 5
    assert [total.limits.stall(events) for events in (20, 21)] == [False, True]
    assert total.limits.soon(1000) == 3
    assert not Share(monkeypatch, NO_LIMITS).limits.stall(1 << 40)


async def test_shards_are_handed_over_where_nothing_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(monkeypatch, SinkLimits(0.5))
    waiting = share.ask()
    await share.goes_on(0.5)
    assert not share.limits.stall(0)
    await share.goes_on(1.0)
    assert share.limits.stall(0)
    end([waiting])


# -- the spread -------------------------------------------------------------------------------------------------------


def test_the_spread_is_determined_by_the_uid_and_even() -> None:
    uids = [str(uuid4()) for _ in range(2000)]
    found = [spread_of(uid, 60.0) for uid in uids]
    assert found == [spread_of(uid, 60.0) for uid in uids]
    assert min(found) >= 0
    assert max(found) < 60
    assert 27 < sum(found) / len(found) < 33
    assert all(round(each * 1000) == each * 1000 or abs(each * 1000 - round(each * 1000)) < 1e-6 for each in found)
    assert spread_of(uids[0], 0.0001) == 0
