"""Full load, many sinks, stops and cancellations; and payloads of every kind, byte for byte."""

from __future__ import annotations

import asyncio

import psycopg

from outbox_relay import outbox
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.sinks.contract.handing import an_event, soon
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.receiver.faults import hang, stall
from tests.support.relay_harness import running, spec
from tests.support.wait import until
from tests.support.webhook_sink import a_sink, many, sending, verdict


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
