"""Events with every value that SQL accepts: how they are drawn and emitted, and where each must be in the end."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, LiteralString, NamedTuple

import psycopg
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.database import Database

EMIT: LiteralString = """
select outbox.emit(%(type)s, %(json)s::jsonb, key => %(key)s, headers => %(headers)s::jsonb,
                   deliver_at => %(deliver_at)s::timestamptz, uid => %(uid)s::uuid, tenant => %(tenant)s,
                   priority => %(priority)s::numeric::integer, unique_key => %(unique_key)s)
"""
EMIT_RAW: LiteralString = """
select outbox.emit_raw(%(type)s, %(bytes)s, key => %(key)s, headers => %(headers)s::jsonb,
                       deliver_at => %(deliver_at)s::timestamptz, uid => %(uid)s::uuid,
                       content_type => %(content_type)s, tenant => %(tenant)s,
                       priority => %(priority)s::numeric::integer, unique_key => %(unique_key)s)
"""
INSERT: LiteralString = """
insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, created_at)
values (outbox_internal.shard_of(coalesce(%(key)s, ''), null),
        coalesce(%(uid)s::uuid, gen_random_uuid()), %(type)s, %(key)s, %(bytes)s, %(content_type)s, %(headers)s::jsonb,
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
odd_values = st.fixed_dictionaries({
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
    "tenant": st.none() | keys,
    "priority": st.none() | st.integers() | st.sampled_from([-32769, -32768, 32767, 32768, 2**31 - 1]),
    "unique_key": st.none() | keys | st.sampled_from(["a", "b"]),
})  # fmt: skip
PLAIN: dict[str, Any] = {
    "type": "t", "key": "k", "json": "1", "bytes": b"1", "headers": None, "deliver_at": None, "created_at": None,
    "uid": None, "content_type": "a/b", "tenant": None, "priority": None, "unique_key": None,
}  # fmt: skip


def _mixed(values: dict[str, Any], odd: set[str]) -> dict[str, Any]:
    return {**values, **{name: value for name, value in PLAIN.items() if name not in odd}}


events = st.builds(_mixed, odd_values, st.sets(st.sampled_from(list(PLAIN))))
"""Events of which some values are odd, so that most are accepted."""
SEED = "OUTBOX_TEST_SEED"
"""Variable with a number that draws the same events again."""
STORED: LiteralString = """
select id, uid::text, key, md5(payload) from outbox.event order by id
"""
ROWS: LiteralString = "select id, state, last_error from outbox.delivery where sink = %s"


class Stored(NamedTuple):
    """An event of the log."""

    id: int
    uid: str
    key: str | None
    digest: str


Log = Mapping[int, Stored]


class Came(NamedTuple):
    """An event at a destination."""

    uid: str
    digest: str


def came(uid: object, payload: bytes | None) -> Came:
    """Return the arrival of an event with this payload."""
    return Came(str(uid), hashlib.md5(payload or b"", usedforsecurity=False).hexdigest())


def emit_examples(database: Database, examples: int) -> None:
    """Emit the events of examples that differ in each run. Raise AssertionError for an unclear refusal.

    The seed is printed. The variable `OUTBOX_TEST_SEED` repeats it.
    """
    number = int(os.environ.get(SEED) or random.randrange(2**32))
    print(f"{SEED}={number} draws these events again")  # noqa: T201
    with database.connect(autocommit=True) as connection:

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(drawn=st.lists(events, min_size=20, max_size=40))
        def emit(drawn: list[dict[str, Any]]) -> None:
            for event in drawn:
                _emit(connection, event)

        emit()


def _emit(connection: psycopg.Connection[Any], event: Mapping[str, Any]) -> None:
    try:
        connection.execute(event["how"], event)
    except psycopg.Error as error:
        assert (error.sqlstate or "").startswith(CLEAR), f"{error.sqlstate} {error}: {event}"  # noqa: PT017


def stored(database: Database) -> dict[int, Stored]:
    """Return the events of the log by id, in the order of their emits. Relays may empty the days of some of them."""
    with database.connect() as connection:
        return {event.id: event for event in map(Stored._make, connection.execute(STORED))}


def undecided(log: Log, database: Database, sink: str, uids: Iterable[object]) -> list[Stored]:
    """Return the events that are not among these and not dead with a reason.

    Events of one uid count each: several may have it.
    """
    due, found = _due(log, database, sink), Counter(map(str, uids))
    missing = Counter(event.uid for event in due) - found
    return [event for event in due if event.uid in missing]


def judge(log: Log, database: Database, sink: str, arrivals: Sequence[Came]) -> None:
    """Raise AssertionError unless each event came once, unchanged and in the order of its key, or is left as a row."""
    due = _due(log, database, sink)
    wanted, found = Counter(Came(event.uid, event.digest) for event in due), Counter(arrivals)
    assert due, "no event was accepted"
    assert not (wanted - found), f"{sink}: missing {wanted - found}"
    assert not (found - wanted), f"{sink}: too many {found - wanted}"
    assert not (wrong := _out_of_order(due, arrivals)), f"{sink}: out of order in {wrong}"


def _due(log: Log, database: Database, sink: str) -> list[Stored]:
    """Return the events that are not left as dead rows with a reason."""
    with database.connect() as connection:
        rows = connection.execute(ROWS, (sink,)).fetchall()
    assert all(reason for _, state, reason in rows if state == "dead"), "dead without a reason"
    left = {number for number, state, _ in rows if state == "dead"}
    return [event for number, event in log.items() if number not in left]


def _out_of_order(due: Sequence[Stored], arrivals: Sequence[Came]) -> dict[str, list[int]]:
    """Return the ids by key, as they came, of keys whose events did not come in the order of their emits.

    An event whose uid another one has cannot be told from that one.
    """
    counts = Counter(event.uid for event in due)
    at = {one.uid: place for place, one in enumerate(arrivals)}
    keys: dict[str, list[int]] = {}
    for event in sorted((event for event in due if counts[event.uid] == 1), key=lambda event: at[event.uid]):
        if event.key is not None:
            keys.setdefault(event.key, []).append(event.id)
    return {key: ids for key, ids in keys.items() if ids != sorted(ids)}
