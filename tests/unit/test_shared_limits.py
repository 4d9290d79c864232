"""The limits that all relays share, in one relay: what it may begin with what the database has given it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits, spread_of
from outbox_relay.postgres.rows import SinkRow
from outbox_relay.relay import shared_rate, shared_slots
from outbox_relay.relay.shared_limits import UNLIMITED, Admission, SharedLimits
from outbox_relay.relay.turns import Turns
from tests.support.limits import LEASE_SECONDS, limited, no_limits
from tests.support.wait import auntil

REQUEST_SECONDS = 2.0
ROW = SinkRow("s", 1, paused=False, circuit="closed", in_flight_limit=None, unowned=0, patterns=("*",))


async def soon(fact: Callable[[], bool], what: str) -> None:
    """Wait until ``fact`` is true."""

    async def asked() -> bool:
        return fact()

    await auntil(asked, seconds=10, what=what)


async def turn() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def ask(shared: SharedLimits, source: Any = "log", most: int = 1) -> asyncio.Task[Admission]:
    """Ask for an admission."""
    return asyncio.create_task(shared.admit(source, REQUEST_SECONDS, most))


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


async def test_a_sink_without_limits_asks_the_database_nothing() -> None:
    shared = no_limits()
    assert not shared.active
    admission = await shared.admit("log", REQUEST_SECONDS, 100)
    assert (admission.events, admission.until) == (100, float("inf"))
    shared.withdraw(UNLIMITED)
    shared.refund(UNLIMITED, 1)
    assert not shared.stall(10**9)


async def test_a_request_waits_for_a_token_and_takes_those_of_100_ms() -> None:
    async with limited(SinkLimits(50.0)) as (shared, database, _):
        requests = [ask(shared) for _ in range(9)]
        await soon(lambda: bool(database.taken), "tokens are asked for")
        assert database.taken[0] == (5, 0)
        assert not any(request.done() for request in requests)
        database.tokens = 9
        await asyncio.wait_for(asyncio.gather(*requests), 10)
        assert sum(wanted for wanted, _ in database.taken[1:]) >= 9
        assert database.tokens == 0


async def test_tokens_are_taken_for_the_time_of_the_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence: goes red when a relay whose database takes 0.3 s to answer gets the tokens of 0.1 s each time."""
    now = 1000.0

    def pass_time() -> None:
        nonlocal now
        now += 0.3

    monkeypatch.setattr(shared_rate, "time", SimpleNamespace(monotonic=lambda: now))
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens, database.pass_time = 1000, pass_time
        for wanted in (100, 400, 400):
            assert (await asyncio.wait_for(shared.admit("log", REQUEST_SECONDS, 4000), 5)).events == wanted


async def test_a_batch_is_sent_with_the_tokens_that_there_are() -> None:
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens = 30
        assert (await shared.admit("log", REQUEST_SECONDS, 4000)).events == 30


async def test_tokens_of_events_that_are_not_sent_go_to_the_next_request() -> None:
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens = 4
        admission = await shared.admit("log", REQUEST_SECONDS, 4)
        waiting = ask(shared)
        await turn()
        assert not waiting.done()
        shared.refund(admission, 3)
        assert (await asyncio.wait_for(waiting, 1)).events == 1


async def test_tokens_that_are_kept_too_long_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens = 4
        shared.withdraw(await shared.admit("log", REQUEST_SECONDS, 4))
        monkeypatch.setattr(shared_rate, "KEEP_SECONDS", 0.0)
        assert (await shared.admit("log", REQUEST_SECONDS)).events == 1
        assert database.taken[-1][1] == 4
        assert database.tokens == 3


async def test_without_an_answer_of_the_database_only_tokens_in_hand_are_spent() -> None:
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens = 3
        shared.withdraw(await shared.admit("log", REQUEST_SECONDS, 3))
        database.down = True
        requests = [ask(shared) for _ in range(5)]
        await soon(lambda: len(database.taken) > 2, "the database is asked again")
        assert sum(request.done() for request in requests) == 3
        database.down, database.tokens = False, 2
        await asyncio.wait_for(asyncio.gather(*requests), 5)


async def test_a_cancelled_request_leaves_its_token_to_the_next() -> None:
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        first, second = ask(shared), ask(shared)
        await turn()
        first.cancel()
        await asyncio.wait({first})
        database.tokens = 1
        assert (await asyncio.wait_for(second, 5)).events == 1


async def test_a_limit_that_is_removed_lets_all_go() -> None:
    async with limited(SinkLimits(0.01)) as (shared, _, leases):
        requests = [ask(shared) for _ in range(5)]
        await turn()
        leases.observe(ROW, stopping=False)
        assert leases.limits == NO_LIMITS
        await asyncio.wait_for(asyncio.gather(*requests), 5)


async def test_shards_are_handed_over_with_events_that_would_take_long() -> None:
    async with limited(SinkLimits(10.0)) as (shared, _, _):
        assert not shared.stall(10)
        assert shared.stall(11)
        assert shared.soon(1000) == 5


async def test_an_idle_relay_gives_its_tokens_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when tokens are kept until the next request: other relays wait for them."""
    monkeypatch.setattr(shared_rate, "KEEP_SECONDS", 0.01)
    async with limited(SinkLimits(1000.0)) as (shared, database, _):
        database.tokens = 4
        shared.withdraw(await shared.admit("log", REQUEST_SECONDS, 4))
        await soon(lambda: database.tokens == 4, "they are given back")
        asked = len(database.taken)
        shared.rate.refund(2)
        await soon(lambda: database.tokens == 6, "later ones are given back, too")
        assert len(database.taken) == asked + 1


async def test_shards_are_handed_over_where_no_token_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rate, "STARVED_SECONDS", 0.0)
    async with limited(SinkLimits(1000.0)) as (shared, _, _):
        assert not shared.stall(1)
        waiting = ask(shared)
        await soon(lambda: shared.stall(1), "it has waited")
        waiting.cancel()


# -- lifetimes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [SinkLimits(1000.0), SinkLimits(None, 3)], ids=["rate", "slots"])
async def test_requests_that_wait_when_the_limits_are_kept_again_are_served(limits: SinkLimits) -> None:
    """The fence: goes red when a run waits for a request although some wait already, as those of a replay may."""
    async with limited(limits) as (shared, database, _):
        waiting = ask(shared, "replay")
        await soon(lambda: bool(database.taken or database.tended), "the database is asked")
    assert not waiting.done()
    assert shared.stall(1)  # nothing keeps the limits
    database.tokens, database.slots = 1, 1
    keeping = asyncio.create_task(shared.run())
    await asyncio.wait_for(waiting, 5)
    assert not shared.stall(1)
    keeping.cancel()
    await asyncio.wait({keeping})


# -- slots ------------------------------------------------------------------------------------------------------------


async def test_no_more_requests_begin_than_there_are_slots_and_an_ended_one_makes_room() -> None:
    async with limited(SinkLimits(None, 3)) as (shared, database, _):
        database.slots = 2
        requests = [ask(shared) for _ in range(4)]
        await soon(lambda: sum(each.done() for each in requests) == 2, "two begin")
        await turn()
        assert sum(each.done() for each in requests) == 2
        requests[0].result().end()
        requests[0].result().end()  # once
        await soon(lambda: sum(each.done() for each in requests) == 3, "a third begins")
        assert database.tended[0][3] == LEASE_SECONDS + REQUEST_SECONDS + shared_slots.MARGIN_SECONDS


async def test_no_request_begins_on_a_lease_that_has_lapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence: goes red when a slot is believed for longer than its lease less the duration of a request."""
    now = 1000.0
    monkeypatch.setattr(shared_slots, "lease_clock", lambda: now)
    async with limited(SinkLimits(None, 3)) as (shared, database, _):
        database.slots = 3
        first = await shared.admit("log", REQUEST_SECONDS)
        assert first.until == now + LEASE_SECONDS - 1.0
        database.down = True
        now += LEASE_SECONDS
        first.end()
        late = ask(shared)
        await soon(lambda: len(database.tended) > 2, "the database is asked again")
        assert not late.done()
        database.down = False
        assert (await asyncio.wait_for(late, 5)).until == now + LEASE_SECONDS - 1.0


async def test_a_slot_that_lapses_while_its_request_waits_for_a_token_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(shared_slots, "lease_clock", lambda: now)
    async with limited(SinkLimits(1000.0, 3)) as (shared, database, _):
        database.slots = 1
        request = ask(shared)
        await soon(lambda: bool(database.taken), "it waits for a token")
        database.down = True
        await turn()
        now += 2 * LEASE_SECONDS
        shared.rate.refund(1)
        await turn()
        assert not request.done()
        database.down, database.tokens = False, 1
        admission = await asyncio.wait_for(request, 5)
        assert admission.until > now


async def test_until_the_answer_no_more_slots_are_used_than_the_database_keeps() -> None:
    """The fence: goes red when a request begins in a slot that the statement under way may have given up."""
    async with limited(SinkLimits(None, 5)) as (shared, database, _):
        database.slots = 5
        requests = [await shared.admit("log", REQUEST_SECONDS) for _ in range(5)]
        for each in requests[1:]:
            each.end()
        shared.slots._peak = 0  # pyright: ignore[reportPrivateUsage]
        database.answering.clear()
        asked = len(database.tended)
        await soon(lambda: len(database.tended) > asked, "slots are given up")
        _, _, kept, _ = database.tended[-1]
        later = [ask(shared) for _ in range(5)]
        await turn()
        assert 1 + sum(each.done() for each in later) <= kept < 5
        database.answering.set()
        await asyncio.wait_for(asyncio.gather(*later[:4]), 5)
        later[4].cancel()


async def test_slots_above_the_fair_share_are_given_up_as_their_requests_end() -> None:
    async with limited(SinkLimits(None, 4)) as (shared, database, _):
        database.slots = 4
        requests = [await shared.admit("log", REQUEST_SECONDS) for _ in range(4)]
        waiting = ask(shared)
        database.slots = 1
        slots: Any = shared.slots
        await soon(lambda: slots._quota == 1, "others want slots")
        for each in requests[:3]:
            each.end()
        await soon(lambda: database.tended[-1][2] == 1, "three are given up")
        assert not waiting.done()
        requests[3].end()
        await asyncio.wait_for(waiting, 5)


async def test_idle_slots_are_given_up_and_then_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(shared_slots, "HOLD_SECONDS", 0.01)
    async with limited(SinkLimits(None, 4)) as (shared, database, _):
        database.slots = 4
        (await shared.admit("log", REQUEST_SECONDS)).end()
        await soon(lambda: database.tended[-1][1:3] == (0, 0), "they are given up")
        asked = len(database.tended)
        await soon(lambda: shared.slots.free == 0, "none is left")
        await turn()
        assert len(database.tended) == asked


async def test_one_relay_alone_says_that_requests_wait() -> None:
    """Goes red when a relay at the limit wants no more than there is: `status` would not name the limit."""
    async with limited(SinkLimits(None, 2)) as (shared, database, _):
        database.slots = 2
        requests = [ask(shared) for _ in range(4)]
        await soon(lambda: bool(database.tended) and database.tended[-1][1] == 3, "it says so")
        for request in requests:
            request.cancel()


async def test_a_longer_time_limit_waits_for_a_longer_lease() -> None:
    async with limited(SinkLimits(None, 4)) as (shared, database, _):
        database.slots = 4
        (await shared.admit("log", REQUEST_SECONDS)).end()
        (await asyncio.wait_for(shared.admit("log", 60.0), 5)).end()
        assert database.tended[-1][3] == LEASE_SECONDS + 60.0 + shared_slots.MARGIN_SECONDS


async def test_slots_are_leased_for_longer_than_extended_requests_also_under_a_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fence: goes red when an extended request outlasts its slot, which another relay then has."""
    now = 1000.0
    monkeypatch.setattr(shared_slots, "lease_clock", lambda: now)
    monkeypatch.setattr(shared_slots, "HOLD_SECONDS", 0.01)
    async with limited(SinkLimits(None, 3)) as (shared, database, leases):
        database.slots = 3
        admission = await shared.admit("parked", REQUEST_SECONDS)
        with shared.outlasting(lambda: {7: now + 3600.0}):
            extended = 3600.0 + shared_slots.MARGIN_SECONDS
            await soon(lambda: database.tended[-1][3] == extended, "the slots are extended")
            await turn()
            assert admission.leased_until == now + extended - 1.0
            leases.renamed_to = "crm"
            await soon(lambda: database.sinks[-1] == "crm", "the new name is used")
            assert database.tended[-1][1:] == (1, 1, extended)
        planned = LEASE_SECONDS + REQUEST_SECONDS + shared_slots.MARGIN_SECONDS
        await soon(lambda: database.tended[-1][3] == planned, "they are leased as usual")
        leases.observe(ROW, stopping=False)
        assert admission.leased_until == float("inf")


async def test_shards_are_handed_over_where_no_slot_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "STARVED_SECONDS", 0.0)
    async with limited(SinkLimits(None, 4)) as (shared, _, _):
        assert not shared.stall(1)
        waiting = ask(shared)
        await soon(lambda: shared.stall(1), "it has waited")
        waiting.cancel()


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
