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

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.sinks import SinkRow
from outbox_relay.relay.keeper import Keeper, fair_quota
from outbox_relay.relay.sink_leases import Lease, SinkLeases


def keeper(store: Any = None, clock: Callable[[], float] = lambda: 100.0) -> Keeper:
    return Keeper(store, uuid4(), "test", "1", 15.0, structlog.get_logger(), clock)


class Register:
    """A store that notes whether the relay's row is there, and renews leases for ``left`` seconds."""

    registered = False
    left = 15.0

    def heartbeat(self, *_: object) -> bool:
        self.registered = True
        return True

    def forget_relay(self, _: object) -> None:
        self.registered = False

    def renew_shards(self, _owner: object, asked: Any, *_: object) -> dict[Any, float]:
        return dict.fromkeys(asked, self.left)


@pytest.mark.parametrize("relays", [1, 2, 3, 5, 64, 70])
def test_fair_shares_are_even_within_one_and_cover_all_shards(relays: int) -> None:
    shares = [fair_quota(relays, before) for before in range(relays)]
    assert sum(shares) == SHARDS
    assert max(shares) - min(shares) <= 1


@pytest.mark.fence("a renewal that its relay has given up takes effect late, and makes a longer lease shorter")
@pytest.mark.parametrize(("left", "believed"), [(2.5, 2.5), (100.0, 15.0)])
def test_a_relay_believes_in_no_more_than_is_left_of_a_lease_and_was_asked_for(left: float, believed: float) -> None:
    """Goes red when the relay counts on what it asked for, or on more: a late renewal may take that away again."""
    store = Register()
    store.left = left
    part = keeper(store)
    leases = part.add("s", 1)
    leases.grant({7: Lease(5, 101.0, 0)})
    part._renew()  # pyright: ignore[reportPrivateUsage]
    assert leases.held[7].until == 100.0 + believed - 1.0


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

    def sinks(self, names: Iterable[str], _: float) -> list[SinkRow]:
        row = SinkRow("", 1, paused=False, circuit="closed", in_flight_limit=None, unowned=SHARDS, patterns=())
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


class Locked(Register):
    """A store in which a settlement of the sink "a" holds its shards."""

    def renew_shards(self, owner: object, asked: Any, *limits: object) -> dict[Any, float]:
        if any(sink == "a" for sink, _, _ in asked):
            raise StatementFailed("a lock", "55P03")
        return super().renew_shards(owner, asked, *limits)


def test_locked_shards_of_one_sink_end_no_leases_of_others_and_those_of_a_silent_loop_are_left() -> None:
    part = keeper(Locked())
    locked, other, silent = (part.add(sink, 1) for sink in ("a", "b", "c"))
    silent.turned_at = 30.0
    for leases in (locked, other, silent):
        leases.grant({7: Lease(5, 101.0, 0)})
    part._renew()  # pyright: ignore[reportPrivateUsage]
    assert [leases.held[7].until for leases in (locked, other, silent)] == [101.0, 114.0, 101.0]


def test_late_answers_change_no_lease_of_a_later_epoch() -> None:
    leases = SinkLeases("s", 1)
    leases.replace({7: Lease(6, 20.0, 0)})
    assert leases.renew({7: 5}, {7: 99.0}) == leases.renew({7: 5}, {}) == 0
    assert leases.held == {7: Lease(6, 20.0, 0)}


@pytest.mark.fence("shards are renewed or claimed again while their release has no answer")
def test_a_renewal_or_a_claim_during_a_release_loses_no_shard() -> None:
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 0), 8: Lease(5, 10.0, 0)})
    with leases.releasing([7, 8]):
        assert leases.renew({7: 5, 8: 5}, {}) == 0
        leases.grant({8: Lease(6, 20.0, 0)})
    assert leases.held == {8: Lease(6, 20.0, 0)}


@pytest.mark.fence("a relay loses a shard and claims it again before its session notices")
def test_a_shard_that_was_lost_and_claimed_again_is_not_delivered_for_before_the_next_session() -> None:
    """Another relay may have owned it in between: goes red when the new lease stands for the old one."""
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 0)})
    assert leases.adopt() == {7}
    assert leases.renew({7: 5}, {}) == 1
    leases.grant({7: Lease(9, 99.0, 0)})
    assert leases.lost
    assert leases.until([7]) == 0.0
    assert leases.epochs([7]) == {7: 5}, "and its settlements stay behind their fence"
    leases.replace({7: Lease(10, 99.0, 0)})
    leases.adopt()
    assert not leases.lost
    assert leases.until([7]) == 99.0


def test_nothing_is_granted_to_a_loop_that_stops() -> None:
    leases = SinkLeases("s", 1)
    leases.stop()
    assert not leases.grant({7: Lease(5, 10.0, 0)})
    leases.observe(SinkRow("s", 1, paused=False, circuit="open", in_flight_limit=3, unowned=0, patterns=("*",)))
    assert not leases.serving


@pytest.mark.fence("a relay that lost a shard delivers")
def test_the_client_of_a_lease_that_has_ended_is_purged() -> None:
    now, purged = [100.0], list[float]()
    part = keeper(clock=lambda: now[0])
    leases = part.add("s", 1)
    leases.purge = lambda: purged.append(now[0])
    leases.grant({7: Lease(5, 100.1, 0)})
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


def test_requests_for_probes_from_before_the_relay_began_are_none() -> None:
    leases = SinkLeases("s", 1)
    row = SinkRow("s", 1, paused=False, circuit="open", in_flight_limit=3, unowned=0, patterns=("*",), probes=7)
    leases.observe(row)
    assert not leases.take_probe_request()
    leases.observe(row._replace(probes=8))
    assert leases.take_probe_request()
    assert not leases.take_probe_request()
