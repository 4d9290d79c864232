"""Full load, many sinks, stops and cancellations; and payloads of every kind, byte for byte."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.sinks.contract.handing import an_event, soon
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import after, say
from tests.support.receiver.faults import hang, stall
from tests.support.receiver.signatures import SECRET
from tests.support.relay_harness import running, spec
from tests.support.service import RelayService
from tests.support.wait import until
from tests.support.webhook_sink import a_sink, many, sending, verdict

IN_FLIGHT = 500
RELAY = """
[database]
dsn = "{dsn}"
[relay]
stop_after_seconds = 20
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
max_in_flight = {in_flight}
[routes]
"*" = ["crm"]
"""


class Crowd:
    """An answer that counts how many requests wait for it at once: those with one of `uids`, or all without."""

    def __init__(self, seconds: float, uids: Collection[str] | None = None) -> None:
        self.now = 0
        self.most = 0
        self._answer = after(seconds, say(200))
        self._uids = uids

    async def __call__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._uids is not None and request.uid not in self._uids:
            return
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self._answer(request, reader, writer)
        finally:
            self.now -= 1


async def test_case_63_one_hung_endpoint_of_a_hundred_holds_nobody_up() -> None:
    """The hung one has as many requests under way as it may; the 99 others answer at once."""
    with Receiver(hang) as hung, Receiver() as receiver:
        urls = [f"{receiver.url}/{n}" for n in range(99)]
        async with (
            sending(hung.url, max_in_flight=64) as stuck,
            many(urls) as sinks,
        ):
            waiting = [asyncio.ensure_future(stuck.deliver([an_event()], soon())) for _ in range(64)]
            await asyncio.to_thread(until, lambda: len(hung.requests) == 64, seconds=10, what="all hang")
            for _ in range(5):
                assert await asyncio.gather(*(verdict(sink) for sink in sinks)) == [DELIVERED] * 99
            assert not any(one.done() for one in waiting)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def open_files() -> int:
    """Return the number of files and sockets of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_case_63_hundreds_of_sinks_that_have_nothing_to_do_hold_no_socket_and_no_thread() -> None:
    """Ten thousand in one relay are not what it is for; what is idle costs nothing of the system all the same."""
    before = (open_files(), threading.active_count())
    async with many([f"http://127.0.0.1:9/{n}" for n in range(300)]):
        assert open_files() <= before[0] + 2
        assert threading.active_count() <= before[1] + 2


def all_sent(receiver: Receiver, count: int) -> Callable[[], bool]:
    """Return whether `count` requests have come."""
    return lambda: len(receiver.requests) >= count


async def test_case_63_a_storm_of_cancelled_requests_leaves_the_pool_as_large_as_it_was() -> None:
    """Some are cancelled while they connect, some while they wait for an answer.

    A busy receiver may read a cancelled request only after the storm: those are not counted.
    """
    events = [an_event() for _ in range(20)]
    crowd = Crowd(0.2, {event.uid for event in events})
    with Receiver(hang) as receiver:
        async with sending(receiver.url, max_in_flight=20) as sink:
            for turn in range(10):
                sent = len(receiver.requests)
                storm = [asyncio.ensure_future(sink.deliver([an_event()], soon())) for _ in range(20)]
                await asyncio.wait(storm, timeout=0.002 * turn)
                if turn % 2:
                    await asyncio.to_thread(
                        until, lambda n=sent: len(receiver.requests) >= n + 20, seconds=5, what="sent"
                    )
                for one in storm:
                    one.cancel()
                assert {type(one) for one in await asyncio.gather(*storm, return_exceptions=True)} == {
                    asyncio.CancelledError
                }
            receiver.answer = crowd
            found = await asyncio.gather(*(verdict(sink, event) for event in events))
            assert found == [DELIVERED] * 20
            assert crowd.most == 20
            await asyncio.to_thread(until, lambda: receiver.open <= 20, seconds=5, what="the cancelled ones are closed")


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


async def test_nothing_is_sent_when_the_time_is_up() -> None:
    with Receiver() as receiver:
        async with sending(receiver.url) as sink:
            [found] = await sink.deliver([an_event()], time.monotonic())
            assert isinstance(found, Unavailable)
            assert receiver.connections == 0


@pytest.mark.slow  # test_stopping stops with fewer
@pytest.mark.timeout(120)
def test_case_63_a_stop_with_500_requests_under_way_loses_and_repeats_nothing(
    database: Database, tmp_path: Path
) -> None:
    """The receiver takes its time, longer than an event is waited for, and less than the relay has to stop."""
    crowd = Crowd(2.0)
    with Receiver(crowd) as receiver:
        text = RELAY.format(dsn=database.dsn, url=receiver.url, secret=SECRET, in_flight=IN_FLIGHT)
        with RelayService(tmp_path, text, "one") as one:
            emit_keys(database, 2 * IN_FLIGHT)
            until(lambda: crowd.now == IN_FLIGHT, seconds=30, what=f"{IN_FLIGHT} are under way")
            assert one.stop() == 0
        asked = len(receiver.requests)
        assert asked >= IN_FLIGHT
        assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
        receiver.answer = say(200)
        with RelayService(tmp_path, text, "two") as two:
            until(lambda: backlog(two) == 0, seconds=60, what="the rest is delivered")
            assert two.stop() == 0
        assert len(receiver.uids) == len(set(receiver.uids)) == 2 * IN_FLIGHT
        assert receiver.unverified == []


def emit_keys(database: Database, count: int) -> None:
    """Emit one event for each of `count` keys."""
    with database.connect() as connection:
        outbox.emit_many(connection, [outbox.Event("test.event", {"n": n}, key=f"k{n}") for n in range(count)])


def backlog(relay: RelayService) -> int:
    """Return the number of events that the sink has still to deliver."""
    return inside("status", "--json", "-c", relay.config).json["sinks"]["crm"]["backlog"]


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


@pytest.mark.parametrize("mode", ["none", "binary"])
def test_case_64_bytes_sent_are_bytes_signed_are_bytes_stored(database: Database, mode: str) -> None:
    with Receiver() as receiver:
        sink = a_sink(receiver.url, cloudevents=mode)
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


def test_case_64_a_byte_more_than_may_be_is_refused_where_it_is_emitted(database: Database) -> None:
    with database.connect() as connection, pytest.raises(outbox.InvalidEvent, match="at most 1048576 bytes"):
        outbox.emit(connection, "test.event", b"x" * (CAP + 1), content_type="text/plain")
    assert query(database, "select count(*) from outbox.event") == [(0,)]
