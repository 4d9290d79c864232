"""Webhooks through a relay: throttling, goodbyes, refusals, crashes, hung endpoints, and payloads byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.admin.status import status
from outbox_relay.domain.outcomes import DELIVERED, RetryPolicy
from outbox_relay.relay import outcomes
from outbox_relay.sinks.contract.handing import an_event, soon
from tests.support.database import Database, query
from tests.support.deliveries import emit, has
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import chosen, in_turn, of_each, say
from tests.support.receiver.faults import hang, stall
from tests.support.relay_harness import running, spec
from tests.support.wait import until
from tests.support.webhook_sink import QUICK_SECONDS, a_sink, many, sending, verdict


def has_all(receiver: Receiver, count: int) -> None:
    """Wait until `count` different events have come to the receiver."""
    until(lambda: len(set(receiver.uids)) >= count, seconds=60, what=f"{count} events came")


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


async def test_case_63_one_hung_endpoint_of_twenty_holds_nobody_up() -> None:
    """The hung one has as many requests under way as it may; the 19 others answer at once."""
    with Receiver(hang) as hung, Receiver() as receiver:
        urls = [f"{receiver.url}/{n}" for n in range(19)]
        async with (
            sending(hung.url, max_in_flight=64) as stuck,
            many(urls) as sinks,
        ):
            waiting = [asyncio.ensure_future(stuck.deliver([an_event()], soon())) for _ in range(64)]
            await asyncio.to_thread(until, lambda: len(hung.requests) == 64, seconds=10, what="all hang")
            for _ in range(5):
                assert await asyncio.gather(*(verdict(sink) for sink in sinks)) == [DELIVERED] * 19
            assert not any(one.done() for one in waiting)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_was_cancelled_does_not_arrive_after_a_reset() -> None:
    with Receiver(at_head=stall) as receiver:
        async with sending(receiver.url) as sink:
            under_way = asyncio.ensure_future(sink.deliver([an_event(payload=b"x" * (1 << 20))], soon()))
            await asyncio.to_thread(until, lambda: receiver.connections == 1, seconds=5, what="it connected")
            under_way.cancel()
            await asyncio.gather(under_way, return_exceptions=True)
            await sink.reset()
        await asyncio.to_thread(until, lambda: receiver.open <= 1, seconds=5, what="the connection is gone")
        assert receiver.requests == []


CAP = 1 << 20
PAYLOADS = {
    "no byte": b"",
    "as much as may be": b"x" * CAP,
    "not UTF-8": b"\xff\xfe\xc3(",
    "every byte": bytes(range(256)),
    "NUL": b"\x00",
    "a lone surrogate in JSON": b'{"s":"\\ud800"}',
    "a lone surrogate as bytes": b'{"s":"\xed\xa0\x80"}',
    "line and paragraph separators": '{"s":"\u2028\u2029"}'.encode(),
    "keys in their order": b'{"b":1,"a":2,"b":3}',
    "numbers as they were written": b'{"n":1.0,"m":1e400,"k":12345678901234567890123}',
    "white space": b' {\r\n\t"a" : 1 }\n',
    "a mark of byte order": b'\xef\xbb\xbf{"a":1}',
}


def test_case_64_bytes_sent_are_bytes_signed_are_bytes_stored(database: Database) -> None:
    with Receiver() as receiver:
        sink = a_sink(receiver.url)
        with running(database.dsn, (spec("crm"), sink)) as harness:
            with database.connect() as connection:
                uids = {name: str(_emit(connection, payload)) for name, payload in PAYLOADS.items()}
                uids["JSON of a mapping"] = str(outbox.emit(connection, "test.event", {"z": "é\u2028", "a": 1.0}))
            until(lambda: len(receiver.uids) >= len(uids), seconds=60, what="all came")
            harness.settled(60)
    sent = {request.uid: request.body for request in receiver.requests}
    stored = dict(query(database, "select uid::text, payload from outbox.event"))
    assert sent == {uid: bytes(payload) for uid, payload in stored.items()}
    assert {name: sent[uids[name]] for name in PAYLOADS} == PAYLOADS
    assert receiver.unverified == []
    assert [request.header("content-length") for request in receiver.requests] == [
        str(len(request.body)) for request in receiver.requests
    ]


def _emit(connection: psycopg.Connection, payload: bytes) -> object:
    return outbox.emit(connection, "test.event", payload, content_type="application/octet-stream")
