"""The SQL functions emit and emit_raw: signatures, casts, limits, wake-up, and nothing left behind."""

from collections.abc import Iterator
from typing import Any, LiteralString
from uuid import RFC_4122, uuid4

import psycopg
import pytest
from psycopg import errors, sql

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION, script
from tests.support.database import Database

WAKE_LOCK = (1869967971, 1)


@pytest.fixture
def conn(shared_database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield a transaction that is rolled back."""
    with shared_database.connect() as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def own(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection to a database of the test's own."""
    with database.connect() as connection:
        yield connection


def stored(
    conn: psycopg.Connection[Any],
    columns: LiteralString = "payload, coalesce(content_type, 'application/json'), key, headers",
) -> Any:
    """Return the newest row of the log."""
    found = conn.execute(sql.SQL("select {} from outbox.event order by id desc limit 1").format(sql.SQL(columns)))
    return found.fetchone()


def count(conn: psycopg.Connection[Any]) -> int:
    """Return the number of events that this transaction sees."""
    [(events,)] = conn.execute("select count(*) from outbox.event").fetchall()
    return events


# -- calls --------------------------------------------------------------------------------------------------------


CALLS: list[tuple[LiteralString, tuple[object, ...]]] = [
    ("emit('t', '[1,  2]')", (b"[1, 2]", "application/json", None, None)),
    ("emit('t', row_to_json(o)::jsonb, id::text)", (b'{"id": 7}', "application/json", "7", None)),
    ("emit('t', jsonb_build_object('n', id), key => id::text)", (b'{"n": 7}', "application/json", "7", None)),
    ("emit('t', cast('1' as jsonb), headers => '{}')", (b"1", "application/json", None, {})),
    ("emit_raw('t', 'abc')", (b"abc", "application/octet-stream", None, None)),
    ("emit_raw('t', '\\x00ff', 'k', content_type => 'x/y')", (b"\x00\xff", "x/y", "k", None)),
    ("emit_raw('t', '')", (b"", "application/octet-stream", None, None)),
    ("emit('t', 'null')", (b"null", "application/json", None, None)),
]


@pytest.mark.parametrize(("call", "row"), CALLS)
def test_calls(conn: psycopg.Connection[Any], call: LiteralString, row: tuple[object, ...]) -> None:
    conn.execute(sql.SQL("select outbox.{} from (select 7 as id) o").format(sql.SQL(call)))
    assert stored(conn) == row


def test_there_are_two_functions_and_no_overloads(conn: psycopg.Connection[Any]) -> None:
    found = conn.execute(
        "select proname, prosecdef, proconfig, pg_get_function_identity_arguments(oid) from pg_proc"
        " where pronamespace = 'outbox'::regnamespace and proname in ('emit', 'emit_raw') order by proname"
    ).fetchall()
    path = ["search_path=pg_catalog, pg_temp"]
    common = "key text, headers jsonb, deliver_at timestamp with time zone, uid uuid"
    queue = "tenant text, priority integer, unique_key text"
    assert found == [
        ("emit", False, None, f"type text, payload jsonb, {common}, {queue}"),
        ("emit_raw", True, path, f"type text, payload bytea, {common}, content_type text, {queue}"),
    ]
    names = conn.execute(
        "select proname from pg_proc where pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])"
        " group by 1 having count(*) > 1"
    )
    assert names.fetchall() == []


def test_a_transaction_has_its_xid_before_it_takes_an_id(conn: psycopg.Connection[Any]) -> None:
    columns = conn.execute(
        "select attrelid::regclass::text, attname from pg_attribute join pg_class c on c.oid = attrelid"
        " where relnamespace = 'outbox'::regnamespace and attnum > 0 and attname in ('xid', 'id')"
        " and (relname = 'event' or starts_with(relname, 'event_') and relispartition) and relkind in ('r', 'p')"
        " order by 1, attnum"
    ).fetchall()
    tables = {table for table, _ in columns}
    assert len(tables) > 2
    assert columns == [(table, name) for table in sorted(tables) for name in ("xid", "id")]
    [(body,)] = conn.execute("select prosrc from pg_proc where oid = 'outbox.emit_raw'::regproc").fetchall()
    assert 0 < body.index("pg_current_xact_id()") < body.index("nextval('outbox.event_id_seq')")


def test_a_uid_names_the_id_of_its_event(conn: psycopg.Connection[Any]) -> None:
    """Of version 7, with the time: consumers and the inbox read it."""
    conn.execute("select outbox.emit('t', '1'), outbox.emit_raw('t', '', uid => %s)", (chosen := uuid4(),))
    [(first, uid, at), (second, own, _)] = conn.execute(
        "select id, uid, extract(epoch from created_at)::float8 from outbox.event order by id"
    ).fetchall()
    assert (uid.version, uid.variant, uid.int & (1 << 48) - 1, own) == (7, RFC_4122, first, chosen)
    assert abs((uid.int >> 80) / 1000 - at) < 1
    found = conn.execute("select outbox_internal.event_id(u) from unnest(%s::uuid[]) u", ([uid, own, uuid4()],))
    assert found.fetchall() == [(first,), (second,), (None,)]


def test_the_shard_follows_the_key_and_without_one_the_uid(conn: psycopg.Connection[Any]) -> None:
    for n in range(400):
        conn.execute("select outbox.emit('t', '1', key => %s)", [f"k{n % 4}" if n < 200 else None])
    shards = conn.execute("select key, count(distinct shard), min(shard), max(shard) from outbox.event group by 1")
    found = {key: (distinct, least, most) for key, distinct, least, most in shards}
    assert all(found[f"k{n}"][0] == 1 for n in range(4))
    distinct, least, most = found[None]
    assert distinct > 50
    assert (least, most) >= (0, 0)
    assert most <= 63


# -- limits -------------------------------------------------------------------------------------------------------

TYPE = 'type must be 1 to 255 visible ASCII characters without space and "*"; '
NAME = "a header name must be a token of letters, digits and !#$%&'*+-.^_`|~; "
CONTENT = "content_type must be 1 to 255 printable ASCII characters; "
CONTROL = 'the value of header "a" must have no control character but a tab; it has '
TIME = "deliver_at must be in the years 1 to 9998 (UTC); this one is "
LIMITS: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "x"}, None),
    ({"type": "!" + "~" * 254}, None),
    ({"type": "x" * 256}, TYPE + "this one has 256 characters"),
    ({"type": ""}, TYPE + "this one has 0 characters"),
    ({"type": "a b"}, TYPE + '"a b" has " " at character 2'),
    ({"type": "order.*"}, TYPE + '"order.*" has "*" at character 7'),
    ({"type": "a\n"}, TYPE + '"a?" has U+000A at character 2'),
    ({"type": "\x7f"}, TYPE + '"?" has U+007F at character 1'),
    ({"type": "é\U0001f600"}, TYPE + '"??" has U+00E9 at character 1'),
    ({"key": "k" * 1024}, None),
    ({"key": "é" * 512}, None),
    ({"key": ""}, None),
    ({"key": "k" * 1025}, "key must have at most 1024 bytes; this one has 1025"),
    ({"key": "é" * 513}, "key must have at most 1024 bytes; this one has 1026"),
    ({"payload": b"x" * 1048576}, None),
    (
        {"payload": b"x" * 1048577},
        "payload must have at most 1048576 bytes (the ceiling: see outbox-relay migrate --max-payload-bytes); "
        "this one has 1048577",
    ),
    ({"content_type": "x" * 255}, None),
    ({"content_type": "x" * 256}, CONTENT + "this one has 256 characters"),
    ({"content_type": ""}, CONTENT + "this one has 0 characters"),
    ({"content_type": "text/plain\r\nx: y"}, CONTENT + '"text/plain??x: y" has U+000D at character 11'),
    ({"headers": {}}, None),
    ({"headers": {"Trace-Id_1!#$%&'*+.^`|~": "\té€ "}}, None),
    ({"headers": {"x" * 255: ""}}, None),
    ({"headers": {"x" * 256: ""}}, "a header name must have 1 to 255 characters; this one has 256"),
    ({"headers": {"": "x"}}, "a header name must have 1 to 255 characters; this one has 0"),
    ({"headers": {"a b": "x"}}, NAME + '"a b" has " " at character 2'),
    ({"headers": {"a:": "x"}}, NAME + '"a:" has ":" at character 2'),
    ({"headers": {"é": "x"}}, NAME + '"?" has U+00E9 at character 1'),
    ({"headers": {"a": "x\r\ny"}}, CONTROL + "U+000D at character 2"),
    ({"headers": {"a": "\x01"}}, CONTROL + "U+0001 at character 1"),
    ({"headers": {"a": "é\x1f"}}, CONTROL + "U+001F at character 2"),
    ({"headers": {"a": "\x7f"}}, CONTROL + "U+007F at character 1"),
    ({"headers": {"a": "x" * 16375}}, None),
    ({"headers": {"a": "x" * 16376}}, "headers must have at most 16384 bytes as JSON; these have 16385"),
]


@pytest.mark.parametrize("content_type", ["application/json", "x/y"], ids=["usual", "unusual"])
@pytest.mark.parametrize(("fields", "said"), LIMITS, ids=range(len(LIMITS)))
def test_limits(conn: psycopg.Connection[Any], content_type: str, fields: dict[str, Any], said: str | None) -> None:
    """Events as most are, and others, at which ``outbox_internal.event_fault`` looks."""
    given: dict[str, Any] = {"type": "t", "payload": b"", "content_type": content_type, **fields}
    event = outbox.Event(**given)
    if said is None:
        outbox.emit(conn, **given)
        outbox.emit_many(conn, [event])
        assert count(conn) == 2
        return
    with pytest.raises(outbox.InvalidEvent) as caught:
        outbox.emit(conn, **given)
    assert str(caught.value) == said
    conn.rollback()
    with pytest.raises(outbox.InvalidEvent) as caught:
        outbox.emit_many(conn, [outbox.Event("t", 1), event])
    assert (str(caught.value), caught.value.index) == (f"event 1: {said}", 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("emit(null, '1')", TYPE + "this one has no value"),
        ("emit('t', null)", "payload must not be null"),
        ("emit_raw('t', null)", "payload must not be null"),
        ("emit('t', '1', headers => '[]')", "headers must be a JSON object of strings, not array"),
        ("emit('t', '1', headers => '\"a\"')", "headers must be a JSON object of strings, not string"),
        ("emit('t', '1', headers => 'null')", "headers must be a JSON object of strings, not null"),
        ("emit('t', '1', headers => '{\"a\": 1}')", 'the value of header "a" must be a string, not number'),
        ("emit('t', '1', headers => '{\"a\": null}')", 'the value of header "a" must be a string, not null'),
        ("emit('t', '1', headers => '{\"a\": {}}')", 'the value of header "a" must be a string, not object'),
        ("emit('t', '1', deliver_at => 'infinity')", TIME + "infinity"),
        ("emit('t', '1', deliver_at => '-infinity')", TIME + "-infinity"),
        ("emit('t', '1', deliver_at => '20000-01-01 00:00+00')", TIME + "20000-01-01 00:00:00+00"),
        ("emit('t', '1', deliver_at => '9999-01-01 00:00+00')", TIME + "9999-01-01 00:00:00+00"),
        ("emit('t', '1', deliver_at => '9999-12-31 23:59:59.999999+00')", TIME + "9999-12-31 23:59:59.999999+00"),
        ("emit('t', '1', deliver_at => '0001-12-31 23:59:59.999999+00 BC')", TIME + "0001-12-31 23:59:59.999999+00 BC"),
        ("emit('t', '1', deliver_at => '0044-03-15 00:00+00 BC')", TIME + "0044-03-15 00:00:00+00 BC"),
        ("emit('t', '1', deliver_at => '0001-01-01 00:00+14')", TIME + "0001-12-31 10:00:00+00 BC"),
        ("emit_raw('t', '', content_type => null)", CONTENT + "this one has no value"),
        ("emit('a b', '\"SECRET\"', 'SECRET')", TYPE + '"a b" has " " at character 2'),
    ],
)
def test_limits_that_only_sql_can_pass(conn: psycopg.Connection[Any], call: LiteralString, said: str) -> None:
    conn.execute("set timezone = 'UTC'")
    with pytest.raises(errors.InvalidParameterValue) as caught:
        conn.execute(sql.SQL("select outbox.{}").format(sql.SQL(call)))
    assert caught.value.diag.message_primary == f"outbox.emit: {said}"
    assert "SECRET" not in f"{caught.value} {caught.value.diag.context}"


@pytest.mark.parametrize("value", ["1048577", "999999999", ""])
def test_no_setting_raises_the_limit_of_payloads(conn: psycopg.Connection[Any], value: str) -> None:
    conn.execute("select set_config('outbox.max_payload_bytes', %s, false)", [value])
    outbox.emit(conn, "t", b"x" * 1048576, content_type="x/y")
    with pytest.raises(outbox.InvalidEvent, match=r"^payload must have at most 1048576 bytes \(the ceiling: "):
        outbox.emit(conn, "t", b"x" * 1048577, content_type="x/y")


def test_the_owner_moves_the_ceiling_and_open_sessions_know(database: Database, own: psycopg.Connection[Any]) -> None:
    own.autocommit = True
    for _ in range(10):  # until the plans are kept
        own.execute("select outbox.emit('t', '1')")
    large = b"x" * 2_000_000
    with pytest.raises(errors.InvalidParameterValue, match="at most 1048576 bytes"):
        own.execute("select outbox.emit_raw('t', %s)", [large])
    found = migrate(database.dsn, max_payload_bytes=2_000_000)
    assert str(found).endswith("; payloads of at most 2000000 bytes")
    own.execute("select outbox.emit_raw('t', %s)", [large])
    assert migrate(database.dsn).max_payload_bytes is None
    with pytest.raises(errors.InvalidParameterValue, match=r"at most 2000000 bytes .*; this one has 2000001"):
        own.execute("select outbox.emit_raw('t', %s)", [large + b"x"])
    own.execute(script(max_payload_bytes=1024, have=SCHEMA_VERSION).encode())
    with pytest.raises(errors.InvalidParameterValue, match="at most 1024 bytes"):
        own.execute("select outbox.emit_raw('t', %s)", [b"x" * 1025])


# -- waking a relay -----------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield a relay that sleeps: it holds the lock, and hears the notifications of emits."""
    with database.connect(autocommit=True) as connection:
        connection.execute("listen outbox")
        connection.execute("select pg_advisory_lock(%s, %s)", WAKE_LOCK)
        yield connection


def heard(sleeper: psycopg.Connection[Any]) -> int:
    """Return the number of notifications: all that were committed before this call."""
    sleeper.execute("select 1")
    return len(list(sleeper.notifies(timeout=0)))


def test_a_sleeping_relay_is_woken_at_the_commit(
    own: psycopg.Connection[Any], sleeper: psycopg.Connection[Any]
) -> None:
    own.execute("select outbox.emit('t', '1') from generate_series(1, 3)")
    assert heard(sleeper) == 0
    own.commit()
    assert heard(sleeper) == 1
    own.execute("select outbox.emit('t', '1')")
    own.rollback()
    assert heard(sleeper) == 0


def test_nobody_is_notified_while_no_relay_sleeps(
    own: psycopg.Connection[Any], sleeper: psycopg.Connection[Any]
) -> None:
    sleeper.execute("select pg_advisory_unlock(%s, %s)", WAKE_LOCK)
    own.execute("select outbox.emit('t', '1')")
    own.commit()
    assert heard(sleeper) == 0


@pytest.mark.usefixtures("sleeper")
def test_prepared_transactions(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("begin")
        conn.execute("select outbox.emit('t', '1')")
        with pytest.raises(errors.FeatureNotSupported, match="NOTIFY"):
            conn.execute("prepare transaction 'noisy'")
        conn.execute("set outbox.wake = off")
        for name in ("kept", "dropped"):
            conn.execute("begin")
            conn.execute("select outbox.emit(%s, '1')", [name])
            conn.execute(sql.SQL("prepare transaction {}").format(sql.Literal(f"{database.name}_{name}")))
        assert count(conn) == 0
        conn.execute(sql.SQL("commit prepared {}").format(sql.Literal(f"{database.name}_kept")))
        conn.execute(sql.SQL("rollback prepared {}").format(sql.Literal(f"{database.name}_dropped")))
        assert conn.execute("select type from outbox.event").fetchall() == [("kept",)]
        conn.execute("set outbox.wake = on")
        conn.execute("select outbox.emit('t', '1')")
