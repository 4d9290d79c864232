"""The relay's records beside those of a real connector that reads the same tables."""

import json
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox_relay.postgres.migrations import migrate
from tests.debezium.records import SECONDS, Reading, as_bytes, compare, read
from tests.support.connect import ConnectWorker
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.wait import until

pytestmark = [pytest.mark.debezium, pytest.mark.timeout(600)]
NAME = "cases"
ROUTER = "transforms.outbox."
STRING = "org.apache.kafka.connect.storage.StringConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
BINARY = "io.debezium.converters.BinaryDataConverter"
PLAIN = "id uuid primary key, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255)"
BIG = "x" * 700_000
AWKWARD = 'q " \\ \\u001f zoë / 漢字 😀 \u2028 \t\n\x0b\x1f\x01\x7f'

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A table, what a connector is told of it, and the rows that are inserted; each becomes one record."""

    columns: str
    rows: Sequence[Row]
    router: Mapping[str, str] = field(default_factory=dict[str, str])
    value: str = STRING
    key: str = STRING
    reading: Reading = as_bytes
    route: str = "aggregatetype"

    @property
    def settings(self) -> dict[str, str]:
        """The settings that connector and adapter share."""
        return {
            "key.converter": self.key,
            "key.converter.schemas.enable": "false",
            "value.converter": self.value,
            "value.converter.schemas.enable": "false",
            "transforms": "outbox",
            ROUTER + "type": "io.debezium.transforms.outbox.EventRouter",
            **{ROUTER + name: text for name, text in self.router.items()},
        }


def row(payload: object, key: str | None = "order-1", kind: str | None = "OrderCreated", **more: object) -> Row:
    """Return a row of a table with Debezium's own columns; the aggregate's type is the name of its case."""
    return {"id": uuid4(), "aggregateid": key, "type": kind, "payload": payload, **more}


def as_json(value: bytes | None) -> object:
    """Return a value as JSON without its null members, which the connector leaves out."""
    return None if value is None else json.loads(value, object_pairs_hook=_without_nulls)


def _without_nulls(members: Sequence[tuple[str, object]]) -> Mapping[str, object]:
    return {name: value for name, value in members if value is not None}


DOCUMENTS: Sequence[object] = [
    {"id": 1, "lines": [{"n": 1, "price": 2.5, "of": {"a": [1, [2]]}}], "name": AWKWARD, "no": None},
    {"": {}, "e": [], "big": 12345678901234567890, "yes": True},
    [1, 2],
    "text",
    None,
]

CASES = {
    "jsonb": Case(
        PLAIN + ", payload jsonb, n integer, b boolean, l bigint, u uuid, extra text, j jsonb, \"Odd Name\" text",
        [
            *(row(Jsonb(document), key=f"order-{n}") for n, document in enumerate(DOCUMENTS)),
            row(Jsonb({"many": BIG})),
            row(None),
            row(Jsonb({}), key=None),
            row(Jsonb({}), key=""),
            row(Jsonb({}), key=AWKWARD, kind="an order, créée"),
            row(Jsonb({}), kind=None),
            row(Jsonb({"a": 1}), n=-4, b=True, l=2**62, u=uuid4(), extra='he said "hi" \\ zoë', j=Jsonb({"k": [1]})),
            row(Jsonb({"a": 1}), n=0, b=False, extra="", **{"Odd Name": "odd"}),
        ],
        {
            "table.fields.additional.placement":
                "type:header:eventType,n:header,b:header,l:header,u:header:uu,extra:header,j:header,id:header,"
                "Odd Name:header:odd",
        },
    ),
    "text": Case(
        "event_id varchar(36) primary key, kind text, owner bigint, topic_of text, body text, part integer, mime text",
        [
            {"event_id": str(uuid4()), "kind": kind, "owner": owner, "body": body, "part": part, "mime": mime}
            for kind, owner, body, part, mime in [
                ("made", 1, '{"as": "it stands",  "a":1e5}', 3, "application/json"),
                ("made", -(2**40), AWKWARD, None, "text/x-awkward"),
                ("a b", 1, "", 0, "text/plain"),
                ("void", 2, " \t\r\n", None, "text/plain"),
                ("void", 2, None, None, "text/plain"),
                ("ü", 3, "null", 5, "text/plain"),
            ]
        ],
        {
            "table.field.event.id": "event_id",
            "table.field.event.key": "owner",
            "table.field.event.payload": "body",
            "route.by.field": "topic_of",
            "route.tombstone.on.empty.payload": "true",
            "table.op.invalid.behavior": "error",
            "table.fields.additional.placement": "kind:header:type,part:partition,mime:header:content-type",
        },
        route="topic_of",
    ),
    "quoted": Case(
        PLAIN + ", payload text",
        [row(AWKWARD), row(""), row(None), row("{}", key=None), row("{}", key=AWKWARD), row('{"a":1}', key="")],
        value=JSON,
        key=JSON,
    ),
    "envelope": Case(
        PLAIN + ", payload jsonb, n integer, b boolean, u uuid, extra text",
        [
            row(Jsonb({"a": AWKWARD}), n=4, b=True, u=uuid4(), extra=AWKWARD),
            row(Jsonb({"a": 1})),
            row(None, kind=None),
        ],
        {
            "table.fields.additional.placement":
                "type:envelope:eventType,n:envelope,b:envelope,u:envelope:uu,extra:envelope,type:header:t",
        },
        value=JSON,
    ),
    "bytes": Case(
        PLAIN + ", payload bytea",
        [row(bytes(range(256)), key="order-2"), row(b"{}"), row(b" "), row(None), row(BIG.encode())],
        {"route.tombstone.on.empty.payload": "true"},
        value=BINARY,
    ),
    "base64": Case(PLAIN + ", payload bytea", [row(bytes(range(256))), row(b""), row(None)], value=JSON),
    "expanded": Case(
        PLAIN + ", payload jsonb",
        [
            row(Jsonb({"id": 1, "name": AWKWARD, "no": None, "of": {"a": [1, 2], "b": 2.50, "c": 12345678901}})),
            row(Jsonb("text")),
            row(None),
        ],
        {"table.expand.json.payload": "true"},
        value=JSON,
        reading=as_json,
    ),
}  # fmt: skip


def connector(server: PostgresServer, table: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Return a connector's configuration for one table: publication, slot and topics are named after it."""
    name = table.replace(".", "_")
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1", "database.port": str(server.port), "database.user": "postgres",
        "database.password": "none", "database.dbname": NAME, "topic.prefix": name,
        "plugin.name": "pgoutput", "slot.name": name, "publication.name": name,
        "publication.autocreate.mode": "filtered", "snapshot.mode": "no_data", "table.include.list": table,
        ROUTER + "route.topic.replacement": "theirs.${routedByValue}",
        **settings,
    }  # fmt: skip


def insert(conn: psycopg.Connection[Any], table: str, values: Row) -> None:
    """Insert one row."""
    names = sql.SQL(", ").join(map(sql.Identifier, values))
    places = sql.SQL(", ").join(sql.Placeholder() * len(values))
    conn.execute(
        sql.SQL("insert into {} ({}) values ({})").format(sql.Identifier(table), names, places), [*values.values()]
    )


@pytest.fixture(scope="module")
def shop(logical: PostgresServer, worker: ConnectWorker) -> Database:
    """Return the cases' tables, adopted, and read by a connector each."""
    logical.create_database(NAME)
    database = Database(logical, NAME)
    migrate(database.dsn, debezium=True)
    with database.connect(autocommit=True) as conn:
        for name, case in CASES.items():
            conn.execute(f"create table {name} ({case.columns})".encode())
            conn.execute("select outbox.adopt_debezium(%s, %s)", [name, Jsonb(case.settings)])
    for name, case in CASES.items():
        worker.ask("PUT", f"/connectors/{name}/config", connector(logical, f"public.{name}", case.settings))
    for name in CASES:
        worker.await_state(name, "RUNNING")
    with database.connect(autocommit=True) as conn:
        active = "select count(*) from pg_replication_slots where active and database = current_database()"
        until(lambda: conn.execute(active).fetchone() == (len(CASES),), seconds=SECONDS, what="connectors read")
    return database


@pytest.fixture(scope="module")
def relay(shop: Database, kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Generator[RelayService]:
    """Yield a relay whose one sink has the lines that the adapter answers, except for the topic's beginning."""
    config = f"""
[database]
dsn = "{shop.dsn}"
[sinks.kafka]
type = "kafka"
topic = "ours.{{headers.aggregatetype}}"
tombstones = true
partition_header = "partition"
type_header = "type"
[sinks.kafka.producer]
"bootstrap.servers" = "{kafka.bootstrap}"
[routes]
"*" = ["kafka"]
"""
    with RelayService(tmp_path_factory.mktemp("debezium"), config) as running:
        yield running


@pytest.fixture(scope="module")
def both(shop: Database, relay: RelayService) -> Database:
    """Return all rows inserted while a connector and the relay read them, one table changed and emptied in between."""
    assert relay.ready
    with shop.connect(autocommit=True) as conn:
        for name, case in CASES.items():
            for values in case.rows[:-1]:
                insert(conn, name, {**values, case.route: name})
        conn.execute("update jsonb set type = 'Changed'")
        conn.execute("delete from jsonb")
        for name, case in CASES.items():
            insert(conn, name, {**case.rows[-1], case.route: name})
    return shop


@pytest.mark.parametrize("name", CASES)
def test_records_are_the_same(both: Database, kafka: KafkaBroker, name: str) -> None:
    case = CASES[name]
    assert both.name == NAME
    theirs = read(kafka, f"theirs.{name}", len(case.rows))
    ours = read(kafka, f"ours.{name}", len(case.rows))
    assert len(theirs) == len(case.rows)
    compare(ours, theirs, case.reading)


def test_each_key_keeps_its_order(both: Database, kafka: KafkaBroker) -> None:
    writers, rows, keys = 4, 60, 7
    with both.connect() as conn:
        conn.execute("create table owner (key integer primary key)")
        conn.execute("insert into owner select generate_series(0, %s)", [keys - 1])

    def write(number: int) -> None:
        with both.connect() as conn:
            for n in range(rows):
                with conn.transaction():
                    key = (number + n) % keys
                    conn.execute("select from owner where key = %s for update", [key])
                    insert(conn, "jsonb", {**row(Jsonb({"n": n}), key=f"owner-{key}"), "aggregatetype": "ordered"})

    threads = [threading.Thread(target=write, args=[number]) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compare(read(kafka, "ours.ordered", writers * rows), read(kafka, "theirs.ordered", writers * rows))
