"""Whatever SQL accepts for an event is refused with a clear error, delivered once, or dead: no session ever ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, LiteralString

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.database import Database
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import auntil

EMIT: LiteralString = """
select outbox.emit(%(type)s, %(json)s::jsonb, key => %(key)s, headers => %(headers)s::jsonb,
                   deliver_at => %(deliver_at)s::timestamptz, uid => %(uid)s::uuid)
"""
EMIT_RAW: LiteralString = """
select outbox.emit_raw(%(type)s, %(bytes)s, key => %(key)s, headers => %(headers)s::jsonb,
                       deliver_at => %(deliver_at)s::timestamptz, uid => %(uid)s::uuid,
                       content_type => %(content_type)s)
"""
INSERT: LiteralString = """
insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at, created_at)
values (coalesce(%(uid)s::uuid, gen_random_uuid()), %(type)s, %(key)s, %(bytes)s, %(content_type)s, %(headers)s::jsonb,
        %(deliver_at)s::timestamptz, coalesce(%(created_at)s::timestamptz, now()))
"""
CLEAR = ("22", "23502", "54001")
"""SQLSTATEs of what is refused: data, a column that must not be null, JSON that is nested too deeply."""

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
times = st.sampled_from([
    "infinity", "-infinity", "4713-01-01 BC", "0044-03-15 BC", "0001-01-01", "0001-01-01 00:00+15:59", "0001-01-02Z",
    "1970-01-01Z", "2000-02-29", "9998-12-31 23:59:59.999999Z", "9999-01-01Z", "9999-12-31 23:59:59.999999-15:59",
    "10000-01-01", "20000-01-01", "294276-12-31", "294277-01-01", "epoch", "now", "tomorrow", "24:00", "not a time",
])  # fmt: skip
keys = text | st.sampled_from(
    ["", " ", "\r\n", "\x7f\x1b", "\ufeff", "\ufffe", "😀" * 256, "k" * 1024, "k" * 1100, "é" * 512]
)
scalars: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers() | text
documents = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4))
json_texts = documents.map(json.dumps) | st.sampled_from([
    "1e400", "-1e-400", "1e5000", '"\\u0000"', '"\\ud800"', "[" * 500 + "]" * 500, "[" * 20000 + "]" * 20000,
    "{", "null", '""',
])  # fmt: skip
header_texts = json_texts | st.dictionaries(text, text, max_size=5).map(json.dumps) | st.sampled_from([
    "{}", '{"traceparent": "x"}', '{"id": "forged"}', '{"a": 1}', '{"a": "\\u0001"}', '{"a": null}',
    json.dumps({"a": "x" * 17000}),
])  # fmt: skip
events = st.fixed_dictionaries({
    "how": st.sampled_from([EMIT, EMIT_RAW, INSERT]),
    "type": st.none() | text | st.sampled_from(["t", "order.created", "a" * 255, "a" * 256, "*", "a b"]),
    "key": st.none() | keys,
    "json": st.none() | json_texts,
    "bytes": st.none() | st.binary(max_size=40) | st.sampled_from([b"x" * 1048576, b"x" * 1048577, b"\xff\xfe"]),
    "headers": st.none() | header_texts,
    "deliver_at": st.none() | times,
    "created_at": st.none() | times,
    "uid": st.none() | st.uuids().map(str) | st.sampled_from(["00000000-0000-0000-0000-000000000000", "no uuid"]),
    "content_type": st.none() | text | st.sampled_from(["text/plain", "application/json", "x" * 255, "x" * 256]),
})  # fmt: skip


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(drawn=st.lists(events, min_size=20, max_size=40))
def test_every_event_that_is_accepted_is_delivered_or_dead(database: Database, drawn: list[dict[str, Any]]) -> None:
    with database.connect(autocommit=True) as connection:
        refusals: list[psycopg.Error] = []
        for event in drawn:
            try:
                connection.execute(event["how"], event)
            except psycopg.Error as error:
                refusals.append(error)
        accepted = {event for (event,) in connection.execute("select id from outbox.event")}
    unclear = [(error.sqlstate, str(error)) for error in refusals if not (error.sqlstate or "").startswith(CLEAR)]
    assert not unclear
    asyncio.run(relayed(database, accepted))


async def relayed(database: Database, accepted: set[int]) -> None:
    """Relay everything to two kinds of sinks; whatever came before in this database is done."""
    sinks = {"batches": MemorySink(), "singles": MemorySink(keeps_order=False)}
    async with running(database.dsn, *((spec(name), sink) for name, sink in sinks.items())) as harness:
        await auntil(
            lambda: _settled_everywhere(database, sinks, accepted), seconds=15, what="all is delivered or dead"
        )
        await harness.stop()
        assert harness.ended == []
    for name, sink in sinks.items():
        assert set(Counter(event.id for event in sink.delivered).values()) <= {1}, name
        assert not {event.id for event in sink.delivered} & {*await _rows(database, name)}


async def _settled_everywhere(database: Database, sinks: dict[str, MemorySink], accepted: set[int]) -> bool:
    """Return True if each event was delivered, now or by an earlier relay, or is a row that is dead or due later."""
    for name, sink in sinks.items():
        rows = await _rows(database, name)
        done = _DELIVERED.setdefault((database.name, name), set())
        done |= {event.id for event in sink.delivered}
        if accepted - done - {event for event, state in rows.items() if state in ("dead", "later")}:
            return False
        assert all(reason for reason in await _reasons(database, name))
    return True


_DELIVERED: dict[tuple[str, str], set[int]] = {}
"""Ids that were delivered, by database and sink."""


async def _rows(database: Database, sink: str) -> dict[int, str]:
    async with await database.aconnect(autocommit=True) as connection:
        cursor = await connection.execute(
            "select id, case when state = 'waiting' and due_at > now() then 'later' else state end "
            "from outbox.delivery where sink = %s",
            (sink,),
        )
        return dict(await cursor.fetchall())


async def _reasons(database: Database, sink: str) -> list[str | None]:
    async with await database.aconnect(autocommit=True) as connection:
        query = "select last_error from outbox.delivery where sink = %s and state = 'dead'"
        return [reason for (reason,) in await (await connection.execute(query, (sink,))).fetchall()]
