"""outbox.adopt_debezium: who needs which right, what is emitted, and what is refused."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from outbox_relay import settings
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION
from tests.support.command import outbox_relay
from tests.support.database import Database
from tests.support.roles import callable_by, denied, functions, new_role

ROUTER = "transforms.outbox."
JSON = {
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
}
TABLE = "id uuid primary key, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255), payload jsonb"


@pytest.fixture
def shop(database: Database) -> Database:
    """Return a database with the adapter and Debezium's table, which is not adopted yet."""
    migrate(database.dsn, debezium=True)
    with database.connect() as conn:
        conn.execute(f"create table outboxevent ({TABLE}, n integer, extra text, made timestamp)".encode())
    return database


@pytest.fixture
def producer(shop: Database) -> Iterator[str]:
    """Yield a role that may write into the table and nothing else."""
    with new_role(shop, "producer") as name:
        with shop.connect() as conn:
            conn.execute(f"grant select, insert, update, delete on outboxevent to {name}".encode())
        yield name


def adopt(shop: Database, table: str = "outboxevent", **options: str) -> str:
    """Adopt a table; `options` are the router's, with `_` for `.`."""
    return adopt_with(shop, {ROUTER + name.replace("_", "."): value for name, value in options.items()}, table)


def adopt_with(shop: Database, connector: object, table: str = "outboxevent") -> str:
    """Adopt a table as a connector's configuration says."""
    with shop.connect() as conn:
        row = conn.execute("select outbox.adopt_debezium(%s, %s)", [table, Jsonb(connector)]).fetchone()
    assert row is not None
    return row[0]


def insert(conn: psycopg.Connection[Any], uid: UUID | None = None, kind: str | None = "OrderCreated") -> UUID:
    """Insert a row."""
    uid = uid or uuid4()
    conn.execute("insert into outboxevent values (%s, 'order', 'order-1', %s, '{\"id\": 1}')", [uid, kind])
    return uid


def emitted(shop: Database, columns: str = "uid") -> Sequence[Any]:
    """Return columns of the log in order; bare values for a single column."""
    with shop.connect() as conn:
        rows = conn.execute(f"select {columns} from outbox.event order by id".encode()).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


# -- emitting -----------------------------------------------------------------------------------------------------


def test_an_insert_is_an_event_of_the_same_transaction(shop: Database, producer: str) -> None:
    adopt(shop)
    with shop.connect(user=producer) as conn:
        insert(conn)
        conn.rollback()
        uid = insert(conn)
        assert emitted(shop) == []
    found = emitted(
        shop, "uid, type, key, convert_from(payload, 'UTF8'), coalesce(content_type, 'application/json'), headers"
    )
    assert found == [(uid, "OrderCreated", "order-1", '{"id": 1}', "application/json", {"aggregatetype": "order"})]


@pytest.mark.parametrize("behavior", ["warn", "error"])
def test_an_update_warns_and_emits_nothing(shop: Database, producer: str, behavior: str) -> None:
    adopt(shop, table_op_invalid_behavior=behavior)
    warnings: list[str | None] = []
    with shop.connect(user=producer) as conn:
        conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        insert(conn)
        conn.execute("update outboxevent set type = 'Changed'")
    assert len(emitted(shop)) == 1
    assert warnings == ["an UPDATE of public.outboxevent is no event: nothing is emitted"]


def test_an_update_is_refused_where_the_connector_would_stop(shop: Database, producer: str) -> None:
    adopt(shop, table_op_invalid_behavior="fatal")
    with shop.connect(user=producer) as conn:
        insert(conn)
        with pytest.raises(errors.TriggeredActionException, match="is no event"):
            conn.execute("update outboxevent set type = 'Changed'")


def test_the_answer_is_what_the_sink_needs(shop: Database, tmp_path: Path) -> None:
    answer = adopt(shop, route_topic_replacement="shop.${routedByValue}.v1")
    assert tomllib.loads(answer) == {"topic": "shop.{headers.aggregatetype}.v1", "tombstones": True}
    answer = adopt(shop, table_fields_additional_placement="type:header")
    assert tomllib.loads(answer)["type_header"] == "type"
    answer = adopt(shop, table_fields_additional_placement="n:partition")
    assert tomllib.loads(answer)["partition_header"] == "partition"
    file = tmp_path / "relay.toml"
    file.write_text(
        f'[sinks.kafka]\ntype = "kafka"\n{answer}\nproducer."bootstrap.servers" = "localhost"\n'
        '[routes]\n"*" = ["kafka"]\n'
    )
    assert settings.load(file, {}, shop.dsn).sinks["kafka"].type == "kafka"


def test_a_table_is_adopted_anew(shop: Database, producer: str) -> None:
    adopt(shop)
    names = functions(shop)
    adopt(shop, table_fields_additional_placement="extra:header")
    assert sorted(functions(shop)) == sorted(names)
    with shop.connect(user=producer) as conn:
        conn.execute("insert into outboxevent (id, extra) values (%s, 'more')", [uuid4()])
    assert emitted(shop, "headers") == [{"extra": "more"}]


# -- rights -------------------------------------------------------------------------------------------------------


def test_nobody_else_may_adopt_or_use_the_trigger(shop: Database, producer: str) -> None:
    adopt(shop)
    with new_role(shop, "app") as app, new_role(shop, "relay") as relay:
        migrate(shop.dsn, grant_emit=[app], grant_relay=[relay])
        for user in (producer, app, relay):
            assert not [name for name in callable_by(shop, user) if "debezium" in name]
            denied(shop, user, "select outbox.adopt_debezium('public.outboxevent')")
        trigger = next(name for name in functions(shop) if re.match(r"outbox_internal\.debezium_\d", name))
        with shop.connect(user=relay) as conn:
            conn.execute(f"create temporary table mine ({TABLE})".encode())
            with pytest.raises(errors.InsufficientPrivilege, match="outbox_internal"):
                conn.execute(f"create trigger t after insert on mine execute function {trigger}".encode())


def test_the_tables_owner_gets_no_code_run_with_the_logs_rights(shop: Database, producer: str) -> None:
    """The type of a column may be changed for one whose casts are functions of the table's owner."""
    adopt(shop)
    with shop.connect() as conn:
        conn.execute(f"grant create on schema public to {producer}".encode())
        conn.execute(f"alter table outboxevent owner to {producer}".encode())
    with shop.connect(user=producer) as conn:
        conn.execute("create type evil as enum ('x')")
        for name in ("text", "uuid", "jsonb", "bytea"):
            conn.execute(
                f"create function sprung_{name}(evil) returns {name} language plpgsql as"
                " $$ begin raise exception 'sprung as %', current_user; end $$".encode()
            )
            conn.execute(f"create cast (evil as {name}) with function sprung_{name} as implicit".encode())
        for column in ("aggregatetype", "aggregateid", "type", "payload"):
            conn.execute(f"alter table outboxevent alter {column} type evil using 'x'".encode())
        with pytest.raises(errors.RaiseException, match=f"sprung as {producer}"), conn.transaction():
            conn.execute("select 'x'::evil::text")
        conn.execute("insert into outboxevent values (%s, 'x', 'x', 'x', 'x')", [uuid4()])
    assert emitted(shop, "type, key, payload") == [("x", "x", b"x")]


def test_the_triggers_function_is_of_the_logs_owner(shop: Database) -> None:
    with new_role(shop, "owner") as owner:
        with shop.connect() as conn:
            conn.execute(f"alter schema outbox owner to {owner}".encode())
        adopt(shop)
        with shop.connect() as conn:
            found = conn.execute(
                "select distinct proowner::regrole::text, prosecdef from pg_proc where proname ~ 'debezium_[0-9]'"
            ).fetchall()
            conn.execute("alter schema outbox owner to postgres")
        assert found == [(owner, True)]


# -- what is refused ----------------------------------------------------------------------------------------------


REFUSED: Sequence[tuple[dict[str, str], str]] = [
    ({"transforms.a.type": "org.apache.kafka.connect.transforms.ReplaceField"}, "transforms.a is another"),
    ({ROUTER + "table.field.event.timestamp": "made"}, "table.field.event.timestamp = made cannot be done"),
    ({ROUTER + "route.topic.regex": "(.*)x"}, "route.topic.regex"),
    ({ROUTER + "route.topic.replacement": "a b"}, "route.topic.replacement may have"),
    ({ROUTER + "table.op.invalid.behavior": "ignore"}, "table.op.invalid.behavior = ignore"),
    ({ROUTER + "table.field.event.key": "nothing"}, "table public.outboxevent has no column nothing"),
    ({ROUTER + "table.field.event.id": "n"}, "column n of table public.outboxevent has type integer"),
    ({ROUTER + "table.fields.additional.placement": "made:header"}, "column made .* has type timestamp"),
    ({ROUTER + "table.fields.additional.placement": "n"}, "n: cannot be done"),
    (
        {ROUTER + "table.fields.additional.placement": "n:header:a b"},
        'a header name must be a token .* "a b" has " " at character 2',
    ),
    ({ROUTER + "table.fields.additional.placement": "n:header:id"}, "header of this name already"),
    ({ROUTER + "table.fields.additional.placement": "n:header:x,extra:header:x"}, "header of this name already"),
    ({ROUTER + "table.fields.additional.placement": "n:envelope"}, "do not go together"),
    ({ROUTER + "table.expand.json.payload": "true"}, "do not go together"),
    ({"value.converter": "io.debezium.converters.BinaryDataConverter"}, "do not go together"),
    ({"value.converter": "io.confluent.connect.avro.AvroConverter"}, "value.converter = io.confluent"),
    ({"value.converter": JSON["value.converter"]}, "value.converter.schemas.enable = false"),
    ({"key.converter": JSON["value.converter"]}, "key.converter.schemas.enable = false"),
    ({"header.converter": JSON["value.converter"]}, "header.converter"),
    ({"binary.handling.mode": "hex"}, "binary.handling.mode"),
]


def test_what_would_be_another_record_is_refused(shop: Database) -> None:
    for connector, what in REFUSED:
        with pytest.raises(psycopg.Error, match=what):
            adopt_with(shop, connector)
    with shop.connect() as conn:
        insert(conn)
    assert emitted(shop) == []


# -- the command --------------------------------------------------------------------------------------------------


def test_the_adapter_is_made_when_asked_for(database: Database) -> None:
    assert not [name for name in functions(database) if "debezium" in name]
    done = outbox_relay("migrate", "--dsn", database.dsn, "--debezium")
    assert (done.code, done.out) == (0, f"schema outbox has version {SCHEMA_VERSION}; outbox.adopt_debezium is there\n")
    with database.connect() as conn:
        conn.execute(f"create table outboxevent ({TABLE})".encode())
    assert adopt(database).startswith("topic")
