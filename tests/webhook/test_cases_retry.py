"""When an event is sent again, and when not: Retry-After, throttling, goodbyes, refusals, crashes, clocks, keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from outbox_relay.admin.status import status
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.relay import outcomes
from tests.support.database import Database, query
from tests.support.deliveries import emit, has
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import chosen, in_turn, of_each, say
from tests.support.receiver.faults import hang
from tests.support.relay_harness import running, spec
from tests.support.wait import until
from tests.support.webhook_sink import QUICK_SECONDS, a_sink


def has_all(receiver: Receiver, count: int) -> None:
    """Wait until `count` different events have come to the receiver."""
    until(lambda: len(set(receiver.uids)) >= count, seconds=60, what=f"{count} events came")


def test_case_57_a_throttling_receiver_is_left_alone_and_others_are_not_touched(database: Database) -> None:
    """Of a storm of 429 little is heard: the sink stands, asks once in a while, and its neighbour has everything."""
    with Receiver(say(429, ("retry-after", "30"))) as stormy, Receiver() as calm:
        sinks = [(spec("stormy"), a_sink(stormy.url)), (spec("calm"), a_sink(calm.url))]
        with running(database.dsn, *sinks):
            emit(database, [f"k{n}" for n in range(500)])
            has_all(calm, 500)
            asked = len(stormy.requests)
            assert 0 < asked <= 64
            circuit = query(database, "select circuit, last_error from outbox.sink where name = 'stormy'")
            assert circuit[0][0] == "open"
            assert "429" in circuit[0][1]
    assert query(database, "select count(*) from outbox.delivery where attempts > 0") == [(0,)]


class Throttle:
    """429 once enough requests wait, 200 for the next one; later ones wait until `is_open`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.now = 0
        self.is_open = False
        self._came = 0

    async def __call__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Behave."""
        self._came += 1
        mine = self._came
        if mine <= self.width:
            await self._until(lambda: self._came >= self.width, writer)
            await say(429)(request, reader, writer)
            return
        if mine > self.width + 1:
            self.now += 1
            await self._until(lambda: self.is_open, writer)
            self.now -= 1
        await say(200)(request, reader, writer)

    async def _until(self, fact: Callable[[], bool], writer: asyncio.StreamWriter) -> None:
        while not fact() and not writer.is_closing():  # noqa: ASYNC110 - opened from another thread
            await asyncio.sleep(0.005)


def test_case_57_the_first_requests_after_a_429_are_half_as_many_and_status_says_so(database: Database) -> None:
    """Requests under way at the 429 are sent again within the new limit; one that takes too long becomes a row."""
    throttle = Throttle(32)
    with Receiver(throttle) as receiver:
        crm = spec("crm", park_after_seconds=0.5)
        with running(database.dsn, (crm, a_sink(receiver.url, max_in_flight=throttle.width))) as harness:
            emit(database, [f"k{n}" for n in range(500)])
            leased = "select 1 from outbox.delivery where lease is not null having count(*) >= 16"
            has(database, leased)
            until(lambda: throttle.now >= 16, seconds=20, what="all of them came")
            assert throttle.now == 16
            assert query(database, "select count(*) from outbox.delivery where lease is not null") == [(16,)]
            has(database, "select 1 from outbox.sink where in_flight_limit = 16")
            assert status(harness.store)["sinks"]["crm"]["in_flight_limit"] == 16
            throttle.is_open = True
            has_all(receiver, 500)
            harness.settled(60)
            has(database, "select 1 from outbox.sink where in_flight_limit is null")
            assert harness.store.calls["record_circuit"] <= 10


def test_case_58_after_a_410_the_sink_pauses_and_when_resumed_nothing_is_lost(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "GONE_SECONDS", 3.0)
    with Receiver(in_turn(say(410), say(200))) as receiver:
        with running(database.dsn, (spec("crm"), a_sink(receiver.url, max_in_flight=1))) as harness:
            emit(database, [f"k{n % 10}" for n in range(100)])
            rows = has(database, "select paused, last_error from outbox.sink where paused")
            assert "410" in str(rows[0])
            asked = len(receiver.requests)
            emit(database, [f"k{n % 10}" for n in range(100)])
            assert asked == len(receiver.requests)
            assert query(database, "select count(*) from outbox.delivery where state = 'dead' or attempts > 0") == [
                (0,)
            ]
            query(database, "update outbox.sink set paused = false returning 1")
            has_all(receiver, 200)
            harness.settled(60)
        assert receiver.unverified == []


def test_case_59_an_event_that_always_fails_holds_only_its_key_and_dies(database: Database) -> None:
    policy = RetryPolicy(attempts=3, base_seconds=0.05, max_seconds=0.1, jitter=0.0)
    sick = b'{"n":3}'
    with Receiver(chosen(_dislikes(sick, say(422)))) as receiver:
        with running(database.dsn, (spec("crm", retry=policy), a_sink(receiver.url))) as harness:
            emit(database, [f"k{n % 3}" for n in range(30)])
            has_all(receiver, 30)
            harness.settled(60)
        dead = query(database, "select key, last_status, attempts from outbox.delivery where state = 'dead'")
        assert dead == [("k0", 422, 3)]
        tries = [place for place, request in enumerate(receiver.requests) if request.body == sick]
        assert len(tries) == 3
        between = receiver.requests[tries[0] + 1 : tries[-1]]
        followers = {json.dumps({"n": n}, separators=(",", ":")).encode() for n in range(6, 30, 3)}
        assert not any(request.body in followers for request in between), "its key waits"
        assert_in_order(receiver)


def _dislikes(body: bytes, answer: Behaviour) -> Callable[[Request], Behaviour]:
    ok = say(200)

    def choose(request: Request) -> Behaviour:
        return answer if request.body == body else ok

    return choose


def assert_in_order(receiver: Receiver) -> None:
    """Assert that the numbers of each key (the number modulo 3) came in order, without repetitions."""
    numbers = list(dict.fromkeys(json.loads(request.body)["n"] for request in receiver.requests))
    for key in range(3):
        of_key = [n for n in numbers if n % 3 == key]
        assert of_key == sorted(of_key)
    assert receiver.unverified == []


def test_case_60_after_a_crash_between_2xx_and_commit_the_same_id_comes_with_a_new_time(
    database: Database,
) -> None:
    """The settlement is held up by a lock, the relay dies, the next one delivers again: a consumer can tell."""
    with Receiver() as receiver, database.connect() as blocker:
        with running(database.dsn, (spec("crm"), a_sink(receiver.url)), lease_seconds=2) as harness:
            harness.owns_all()
            blocker.execute("lock table outbox.progress in exclusive mode")
            emit(database, ["k"])
            has_all(receiver, 1)
        query(database, "select pg_terminate_backend(pid) from pg_stat_activity where wait_event_type = 'Lock'")
        blocker.rollback()
        with running(database.dsn, (spec("crm"), a_sink(receiver.url)), lease_seconds=2):
            until(lambda: len(receiver.requests) >= 2, seconds=60, what="it came again")
    first, second = receiver.requests[:2]
    assert first.uid == second.uid
    assert first.body == second.body
    assert int(second.header("webhook-timestamp") or 0) > int(first.header("webhook-timestamp") or 0)
    assert first.header("webhook-signature") != second.header("webhook-signature")
    assert receiver.unverified == []


def test_every_attempt_of_an_event_has_the_same_id_and_its_own_number(database: Database) -> None:
    with (
        Receiver(of_each(say(500), hang, say(200))) as receiver,
        running(database.dsn, (spec("crm"), a_sink(receiver.url, timeout_seconds=QUICK_SECONDS))) as harness,
    ):
        emit(database, ["k"])
        until(lambda: len(receiver.requests) >= 3, seconds=60, what="it came three times")
        harness.settled(60)
    assert len(set(receiver.uids)) == 1
    assert [request.header("outbox-attempt") for request in receiver.requests] == ["1", "2", "3"]
    assert {request.header("idempotency-key") for request in receiver.requests} == set(receiver.uids)
