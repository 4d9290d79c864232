"""emit from Python: one row, one round trip, in the caller's transaction, and nothing else changed."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.adapt import Loader
from psycopg.types.string import StrDumper

from outbox_relay import outbox
from outbox_relay.outbox import Event, InvalidEvent, NotInTransaction
from tests.support.database import Database
from tests.support.wait import until

COLUMNS = "uid, type, key, payload, coalesce(content_type, 'application/json'), headers, deliver_at"


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    connection = database.connect()
    with connection:
        yield connection


def events(database: Database, columns: str = COLUMNS) -> list[tuple[Any, ...]]:
    """Return the committed events, of the log and scheduled, in the order of ids."""
    held = "id, uid, type, key, payload, content_type, headers, deliver_at"
    both = f"(select {held} from outbox.event union all select {held} from outbox.scheduled) e"
    with database.connect() as connection:
        return connection.execute(f"select {columns} from {both} order by id".encode()).fetchall()


def loaded_by(module: str) -> set[str]:
    """Return the modules, outside the standard library, that a fresh interpreter has after importing this one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}


def test_importing_emit_loads_psycopg_and_nothing_of_the_relay() -> None:
    psycopg_alone = loaded_by("psycopg")
    below = {"callers", "emit_rows", "emit_spans", "inbox_marks", "statements"}
    for name in ("outbox", "inbox"):
        expected = {"outbox_relay", *(f"outbox_relay.{each}" for each in below | {name})}
        assert loaded_by(f"outbox_relay.{name}") - psycopg_alone == expected


def test_every_field_arrives_as_it_was_given(database: Database, conn: psycopg.Connection[Any]) -> None:
    later = datetime.now(UTC) + timedelta(hours=1, microseconds=7)
    uid = outbox.emit(
        conn,
        "order.created",
        {"ä": [1, None]},
        key="schlüssel",
        headers={"a": "ü", "b": "2"},
        deliver_at=later,
    )
    conn.commit()
    payload = '{"ä":[1,null]}'.encode()
    row = (uid, "order.created", "schlüssel", payload, "application/json", {"a": "ü", "b": "2"}, later)
    assert events(database) == [row]
    assert uid.version == 7


def quoted(value: object) -> str:
    """Encode as text."""
    return json.dumps(str(value))


def bracketed(value: bytes) -> bytes:
    """Encode as bytes."""
    return b"<" + value + b">"


PAYLOADS: list[tuple[object, dict[str, Any], bytes, str]] = [
    (None, {}, b"null", "application/json"),
    ({"b": 1, "a": [1.5, True]}, {}, b'{"b":1,"a":[1.5,true]}', "application/json"),
    ("\x00 \u2028 \U0001f600", {}, '"\\u0000 \u2028 \U0001f600"'.encode(), "application/json"),
    ("\ud800é", {}, b'"\\ud800\\u00e9"', "application/json"),
    ({"v": 1}, {"content_type": "application/vnd.shop+json"}, b'{"v":1}', "application/vnd.shop+json"),
    (b"\x00\xff", {"content_type": "image/png"}, b"\x00\xff", "image/png"),
    (bytearray(b"ab"), {"content_type": "text/plain"}, b"ab", "text/plain"),
    (memoryview(b""), {"content_type": "text/plain"}, b"", "text/plain"),
    (Decimal("1.50"), {"dumps": quoted}, b'"1.50"', "application/json"),
    (b"raw", {"dumps": bracketed}, b"<raw>", "application/json"),
]


@pytest.mark.parametrize(("payload", "options", "stored", "content_type"), PAYLOADS)
def test_payloads(
    database: Database,
    conn: psycopg.Connection[Any],
    payload: object,
    options: dict[str, Any],
    stored: bytes,
    content_type: str,
) -> None:
    outbox.emit(conn, "t", payload, **options)
    outbox.emit_many(conn, [Event("t", payload, **options)])
    conn.commit()
    assert events(database, "payload, coalesce(content_type, 'application/json')") == [(stored, content_type)] * 2


def test_rolled_back_transactions_and_savepoints_emit_nothing(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    outbox.emit(conn, "rolled.back", 1)
    conn.rollback()
    kept = outbox.emit(conn, "kept", 1)
    with conn.transaction() as savepoint:
        outbox.emit(conn, "savepoint", 1)
        outbox.emit_many(conn, [Event("savepoint", 1), Event("savepoint", 1)])
        raise psycopg.Rollback(savepoint)
    with conn.transaction():
        inner = outbox.emit(conn, "inner", 1)
    assert events(database) == []
    conn.commit()
    assert events(database, "uid, type") == [(kept, "kept"), (inner, "inner")]


@pytest.mark.parametrize("kind", [psycopg.ClientCursor, psycopg.Cursor])
def test_any_kind_of_cursor_and_any_adapters_will_do(
    database: Database, conn: psycopg.Connection[Any], kind: type[psycopg.Cursor[Any]]
) -> None:
    class Text(Loader):
        def load(self, data: Any) -> str:
            return bytes(data).decode()

    conn.adapters.register_loader("uuid", Text)
    conn.adapters.register_dumper(str, StrDumper)
    later = datetime(2030, 1, 1, tzinfo=UTC)
    mine = uuid4()
    with kind(conn) as cursor:
        first = outbox.emit(cursor, "t", 1, key="k", headers={"a": "b"}, deliver_at=later, uid=mine)
        second = outbox.emit_many(cursor, [Event("t", 1, "k", {"a": "b"}, later)])
    conn.commit()
    row = ("t", "k", b"1", "application/json", {"a": "b"}, later)
    assert events(database) == [(first, *row), (*second, *row)]
    assert first == mine


# -- round trips --------------------------------------------------------------------------------------------------


def round_trips(connection: psycopg.Connection[Any], action: Callable[[], object]) -> int:
    """Return the number of waits for the server: each query or sync is answered by one ReadyForQuery."""
    with tempfile.TemporaryFile() as log:
        connection.pgconn.trace(log.fileno())
        try:
            action()
        finally:
            connection.pgconn.untrace()
        log.seek(0)
        return log.read().count(b"\tReadyForQuery\t")


def test_one_round_trip_for_one_and_for_many(conn: psycopg.Connection[Any]) -> None:
    conn.execute("select 1")  # the caller's transaction has begun
    batch = [Event("t", {"n": n}, key=str(n)) for n in range(500)]
    assert round_trips(conn, lambda: conn.execute("select 1")) == 1
    for _ in range(7):  # more often than psycopg waits before it prepares
        assert round_trips(conn, lambda: outbox.emit(conn, "t", 1, uid=uuid4(), headers={"a": "b"})) == 1
        assert round_trips(conn, lambda: outbox.emit_many(conn, batch)) == 1
    assert round_trips(conn, lambda: outbox.emit_many(conn, [])) == 0
    assert conn.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


def test_pipeline_mode(database: Database, conn: psycopg.Connection[Any]) -> None:
    with conn.pipeline():
        conn.execute("create temporary table seen (n integer)")
        first = outbox.emit(conn, "a", 1)
        conn.execute("insert into seen values (1)")
        rest = outbox.emit_many(conn, [Event("b", 1), Event("c", 1)])
    conn.commit()
    assert events(database, "uid, type") == [(first, "a"), (rest[0], "b"), (rest[1], "c")]


# -- many ---------------------------------------------------------------------------------------------------------


def test_many_keep_their_order_and_their_fields(database: Database, conn: psycopg.Connection[Any]) -> None:
    later = datetime(2031, 5, 6, 7, 8, 9, 10, tzinfo=UTC)
    mine = uuid4()
    batch = [
        Event("a", {"quote": '"\\,{}'}),
        Event("b", b"\x00", content_type="x/y"),
        Event("c", 3, key='k"\\,{ }', headers={"h": '"\\,{}'}, deliver_at=later, uid=mine),
        Event("d", 4, key=""),
        Event("NULL", 5, key="NULL"),
    ]
    uids = outbox.emit_many(conn, iter(batch))
    conn.commit()
    assert events(database) == [
        (uids[0], "a", None, b'{"quote":"\\"\\\\,{}"}', "application/json", None, None),
        (uids[1], "b", None, b"\x00", "x/y", None, None),
        (uids[2], "c", 'k"\\,{ }', b"3", "application/json", {"h": '"\\,{}'}, later),
        (uids[3], "d", "", b"4", "application/json", None, None),
        (uids[4], "NULL", "NULL", b"5", "application/json", None, None),
    ]
    assert uids[2] == mine


def test_many_name_the_event_that_was_refused(database: Database, conn: psycopg.Connection[Any]) -> None:
    for bad, said in (
        (Event("t", 1, key="k" * 1025), "key must have at most 1024 bytes"),
        (Event("t", {1j}), "payload"),
    ):
        with pytest.raises(InvalidEvent, match=rf"^event 2: {said}") as caught:
            outbox.emit_many(conn, [Event("t", 1), Event("t", 2), bad, Event("*", 4)])
        assert caught.value.index == 2
        conn.rollback()
    assert events(database) == []


# -- outside a transaction ----------------------------------------------------------------------------------------


def test_autocommit_outside_a_transaction_warns_where_it_was_called(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        for call in (lambda: outbox.emit(conn, "t", 1), lambda: outbox.emit_many(conn, [Event("t", 1)])):
            with pytest.warns(NotInTransaction, match=r"conn\.transaction\(\)") as caught:
                call()
            assert [warning.filename for warning in caught] == [__file__]
        with conn.transaction():
            outbox.emit(conn, "t", 1)
        with conn.pipeline(), conn.transaction():
            outbox.emit(conn, "t", 1)
    assert len(events(database)) == 4


# -- the caller's own uid -----------------------------------------------------------------------------------------


def test_a_uid_is_emitted_once(database: Database, conn: psycopg.Connection[Any]) -> None:
    uid = uuid4()
    assert outbox.emit(conn, "first", 1, uid=uid) == uid
    assert outbox.emit(conn, "again", 1, uid=uid) == uid
    conn.commit()
    assert outbox.emit(conn, "later", 1, uid=uid) == uid
    other = uuid4()
    batch = [Event("many", 1, uid=uid), Event("many", 2, uid=other), Event("many", 3, uid=other)]
    assert outbox.emit_many(conn, batch) == [uid, other, other]
    conn.commit()
    assert events(database, "uid, type, payload") == [(uid, "first", b"1"), (other, "many", b"2")]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_at_once_the_second_waits_for_the_first(database: Database, end: str) -> None:
    uid = uuid4()
    with database.connect() as first, database.connect() as second, database.connect(autocommit=True) as watcher:
        outbox.emit(first, "first", 1, uid=uid)
        found: list[UUID] = []
        thread = threading.Thread(target=lambda: found.append(outbox.emit(second, "second", 1, uid=uid)))
        thread.start()
        waiting = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        pid = second.info.backend_pid
        until(lambda: watcher.execute(waiting, [pid]).fetchone(), seconds=20, what="the second emit waits for a lock")
        getattr(first, end)()
        thread.join(timeout=20)
        second.commit()
    assert found == [uid]
    assert events(database, "type") == [("first" if end == "commit" else "second",)]


# -- misuse -------------------------------------------------------------------------------------------------------


def refused(conn: psycopg.Connection[Any], **fields: Any) -> str:
    """Return the error for an event with these fields, which is refused before anything is sent."""
    arguments: dict[str, Any] = {"type": "t", "payload": 1, **fields}
    with pytest.raises(InvalidEvent) as caught:
        outbox.emit(conn, arguments.pop("type"), arguments.pop("payload"), **arguments)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    return str(caught.value)


def answers(value: object) -> Callable[[object], object]:
    """Return an encoder that returns this for every payload."""
    return lambda _: value


def fails(payload: object) -> str:
    """Raise an error that contains the payload."""
    raise KeyError(payload)


WEST = timezone(-timedelta(hours=3))
UNSENT: list[tuple[dict[str, Any], str]] = [
    ({"type": 7}, "type must be a str, not int"),
    ({"type": "a\0"}, "type must not have a NUL character"),
    ({"key": 7}, "key must be a str, not int"),
    ({"key": "a\0"}, "key must not have a NUL character"),
    ({"key": "\ud800"}, "key must be UTF-8; it has a lone surrogate"),
    ({"headers": [("a", "b")]}, "headers must be a mapping of str to str, not list"),
    ({"headers": {1: "b"}}, "header name must be a str, not int"),
    ({"headers": {"a": 1}}, "the value of header 'a' must be a str, not int"),
    ({"headers": {"a": "\0"}}, "the value of header 'a' must not have a NUL character"),
    ({"headers": {"a": "\udfff"}}, "the value of header 'a' must be UTF-8; it has a lone surrogate"),
    ({"deliver_at": "tomorrow"}, "deliver_at must be a datetime, not str"),
    ({"deliver_at": datetime(2030, 1, 1)}, "deliver_at must have a time zone, such as datetime.now(UTC)"),  # noqa: DTZ001
    ({"deliver_at": datetime.max.replace(tzinfo=WEST)}, "deliver_at lies outside the years 1 to 9999 in UTC"),
    ({"uid": "x"}, "uid must be a uuid.UUID, not str"),
    ({"content_type": 7}, "content_type must be a str, not int"),
    ({"payload": b"x"}, "payload is bytes, so content_type is needed, such as 'application/octet-stream'"),
    (
        {"payload": "x", "dumps": answers("\ud800")},
        "payload must be UTF-8, but dumps returned lone surrogates",
    ),
    ({"payload": "x", "dumps": fails}, "payload is not serialisable: dumps raised KeyError"),
    (
        {"payload": "x", "dumps": answers(None)},
        "payload is not serialisable: dumps must return str or bytes, not NoneType",
    ),
    (
        {"payload": "x", "dumps": answers(7)},
        "payload is not serialisable: dumps must return str or bytes, not int",
    ),
]


@pytest.mark.parametrize(("fields", "said"), UNSENT, ids=range(len(UNSENT)))
def test_what_cannot_be_sent_is_refused_before_it_is(
    conn: psycopg.Connection[Any], fields: dict[str, Any], said: str
) -> None:
    assert refused(conn, **fields) == said


def test_no_error_holds_the_payload(conn: psycopg.Connection[Any]) -> None:
    event = Event("a b", {"card": "SECRET"}, key="k", headers={"h": "SECRET"})
    with pytest.raises(InvalidEvent) as caught:
        outbox.emit(conn, event.type, event.payload, headers=event.headers)
    shown = [str(caught.value), repr(caught.value.__cause__), repr(event)]
    assert not any("SECRET" in text for text in shown)


async def test_the_wrong_kind_of_connection(database: Database, conn: psycopg.Connection[Any]) -> None:
    async with await database.aconnect() as aconn:
        with pytest.raises(TypeError, match=r"emit takes .* not psycopg\.AsyncConnection; there is aemit"):
            outbox.emit(aconn, "t", 1)  # pyright: ignore[reportArgumentType] - the mistake
        with pytest.raises(TypeError, match=r"aemit takes .* not psycopg\.Connection; there is emit"):
            await outbox.aemit(conn, "t", 1)  # pyright: ignore[reportArgumentType] - the mistake
        with pytest.raises(TypeError, match=r"emit takes .* not builtins\.str"):
            outbox.emit_many("dsn", [Event("t", 1)])  # pyright: ignore[reportArgumentType] - the mistake


def test_a_connection_in_another_encoding(database: Database, conn: psycopg.Connection[Any]) -> None:
    conn.execute("set client_encoding to latin1")
    conn.commit()
    outbox.emit(conn, "t", "€", key="ü", headers={"h": "€"})
    conn.commit()
    with pytest.raises(InvalidEvent, match=r"characters that the encoding .* lacks"):
        outbox.emit(conn, "t", 1, key="€")
    conn.rollback()
    assert events(database, "payload, key, headers") == [('"€"'.encode(), "ü", {"h": "€"})]
