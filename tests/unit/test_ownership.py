"""Leases of shards in one relay: answers that come late, shards that were lost, and clients whose leases end.

The store is a stand-in: two answers of a database cannot be made to arrive in a chosen order. ``tests.simulation`` asks
for the same in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import pytest
import structlog

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.sinks import SinkRow
from outbox_relay.relay.keeper import Keeper, fair_quota
from outbox_relay.relay.sink_leases import Lease, SinkLeases


def keeper(store: Any = None, clock: Callable[[], float] = lambda: 100.0) -> Keeper:
    return Keeper(store, uuid4(), "test", "1", 15.0, structlog.get_logger(), clock)


class Register:
    """A store that notes whether the relay's row is there. The relay owns shard 7 of every sink."""

    registered = False

    def heartbeat(self, *_: object) -> bool:
        self.registered = True
        return True

    def forget_relay(self, _: object) -> None:
        self.registered = False

    def renew_sessions(self, _owner: object, sinks: Iterable[str], *_: object) -> dict[str, dict[int, int]]:
        return {sink: {7: 5} for sink in sinks}


@pytest.mark.parametrize("relays", [1, 2, 3, 5, 64, 70])
def test_fair_shares_are_even_within_one_and_cover_all_shards(relays: int) -> None:
    shares = [fair_quota(relays, before) for before in range(relays)]
    assert sum(shares) == SHARDS
    assert max(shares) - min(shares) <= 1


def test_no_heartbeat_brings_back_the_row_of_a_relay_that_has_left() -> None:
    store = Register()
    part = keeper(store)
    part._beat()  # pyright: ignore[reportPrivateUsage]
    assert store.registered
    part.leave()
    part._beat()  # pyright: ignore[reportPrivateUsage]
    assert not store.registered


class Slow(Register):
    """A store whose claims take 10 s each, and find nothing."""

    def __init__(self) -> None:
        self.now, self.claimed = 100.0, list[str]()

    def sinks(self, names: Iterable[str], *_: object, **__: object) -> list[SinkRow]:
        row = SinkRow("", 1, paused=False, circuit="closed", in_flight_limit=None, owned=0, patterns=())
        return [row._replace(name=name) for name in names]

    def relay_ranks(self, *_: object) -> list[Any]:
        return []

    def claim_shards(self, sink: str, *_: object, **__: object) -> list[Any]:
        self.now += 10.0
        self.claimed.append(sink)
        return []


def test_every_sink_has_its_turn_at_claims_that_take_longer_than_a_renewal_may_wait() -> None:
    """Goes red when each round begins with the first sink: no relay would own the shards of the last ones."""
    store = Slow()
    part = keeper(store, lambda: store.now)
    for sink in ("a", "b", "c"):
        part.add(sink, 1)
    for _ in range(3):
        part.round()
    assert set(store.claimed) == {"a", "b", "c"}


@pytest.mark.fence("a relay trusts a lease that it has not renewed, or shards that are not its own")
def test_a_renewal_extends_the_lease_of_each_sink_but_those_of_silent_loops_and_keeps_what_is_owned() -> None:
    """A lease is counted from before the renewal was sent, less a margin. Shard 8 was lost."""
    part = keeper(Register())
    one, silent = part.add("a", 1), part.add("b", 1)
    silent.turned_at = 30.0
    for leases in (one, silent):
        leases.grant({7: Lease(5), 8: Lease(5)})
    part._renew()  # pyright: ignore[reportPrivateUsage]
    assert (one.ends_at, one.held) == (114.0, {7: Lease(5)})
    assert (silent.ends_at, len(silent.held)) == (0.0, 2)


def test_late_answers_change_no_shard_of_a_later_epoch() -> None:
    leases = SinkLeases("s", 1)
    leases.replace({7: Lease(6)}, 20.0)
    assert leases.renew({7: 5}, {7: 5}, 30.0) == leases.renew({7: 5}, {}, 30.0) == 0
    assert leases.held == {7: Lease(6)}


@pytest.mark.fence("shards are renewed or claimed again while their release has no answer")
def test_a_renewal_or_a_claim_during_a_release_loses_no_shard() -> None:
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5), 8: Lease(5)})
    with leases.releasing([7, 8]):
        assert leases.renew({7: 5, 8: 5}, {}, 20.0) == 0
        leases.grant({8: Lease(6)})
    assert leases.held == {8: Lease(6)}


@pytest.mark.fence("a relay loses a shard and claims it again before its session notices")
def test_a_shard_that_was_lost_and_claimed_again_is_not_delivered_for_before_the_next_session() -> None:
    """Another relay may have owned it in between: goes red when the new lease stands for the old one."""
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5)})
    assert leases.adopt() == {7}
    assert leases.renew({7: 5}, {}, 99.0) == 1
    leases.grant({7: Lease(9)})
    assert leases.lost
    assert leases.until([7]) == 0.0
    assert leases.epochs([7]) == {7: 5}, "and its settlements stay behind their fence"
    leases.replace({7: Lease(10)}, 99.0)
    leases.adopt()
    assert not leases.lost
    assert leases.until([7]) == 99.0


@pytest.mark.fence("a relay that lost a shard delivers")
def test_the_client_of_a_lease_that_has_ended_is_purged() -> None:
    now, purged = [100.0], list[float]()
    part = keeper(clock=lambda: now[0])
    leases = part.add("s", 1)
    leases.purge = lambda: purged.append(now[0])
    leases.grant({7: Lease(5)})
    leases.ends_at = 100.1
    leases.adopt()
    assert part.purge_lapsed() == pytest.approx(0.1)
    assert not purged
    now[0] = 100.1
    part.purge_lapsed()
    assert purged == [100.1]
    leases.adopted, leases.rows_until = {}, 100.2
    part.purge_lapsed()
    now[0] = 100.2
    part.purge_lapsed()
    assert purged == [100.1, 100.2]
