"""Secrets and payloads stay where they belong: in no log, status, error or table, whatever a receiver echoes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg import sql

from outbox_relay import outbox
from tests.support.command import inside
from tests.support.database import Database
from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import head
from tests.support.service import RelayService
from tests.support.wait import until

KEY = b"canary-of-a-signing-key-0"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
PASSWORD = "canary-of-a-password"
TOKEN = "canary-of-a-token-in-the-url"
HEADER = "canary-of-a-header-of-the-settings"
PAYLOAD = "canary-of-a-payload"
PROXY_PASSWORD = "canary-of-the-password-of-a-proxy"
PROXY = base64.b64encode(f"relay:{PROXY_PASSWORD}".encode()).decode()
CANARIES = {
    "signing secret": SECRET.removeprefix("whsec_"),
    "signing key": KEY.decode(),
    "password": PASSWORD,
    "token of the URL": TOKEN,
    "header of the settings": HEADER,
    "payload": PAYLOAD,
    "authorization of the proxy": PROXY,
    "password of the proxy": PROXY_PASSWORD,
}
SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}/{token}?token={token}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = 2
forward_headers = ["x-event"]
headers = {{ authorization = {{ env = "CANARY_HEADER" }} }}
{more}
[sinks.{name}.retry]
attempts = 2
base_seconds = 0.05
[sinks.{name}.circuit]
open_after = {most}
probe_seconds = 0.2
probe_max_seconds = 0.2
"""


def echo(request: Request) -> bytes:
    """Everything that came, in one text."""
    lines = [f"{request.method} {request.target}", *(f"{name}: {value}" for name, value in request.headers)]
    return "\n".join(lines).encode() + b"\n\n" + request.body


async def headers_alone(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 500 and repeat everything but the payload: this answer is kept, without its secrets."""
    body = b"I got: " + echo(request).removesuffix(request.body).strip()
    writer.write(head(500, [("content-length", str(len(body)))]) + body)
    await writer.drain()


def echoing(status: int) -> Behaviour:
    """Return a behaviour that answers with the request in the body, the headers and the reason phrase."""

    async def behave(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = echo(request)
        line = " ".join(body.decode("latin-1").split())
        headers = [("location", f"http://h{request.target}"), ("x-echo", line), ("content-length", str(len(body)))]
        if status == 429:
            headers.append(("retry-after", line))
        writer.write(head(status, headers, reason=line) + body)
        await writer.drain()

    return behave


async def nonsense(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer without HTTP, with the request once more."""
    writer.write(echo(request) + b"\r\n\r\n")
    await writer.drain()
    writer.close()


async def bad_header(request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Repeat the request where no header may be."""
    writer.write(b"HTTP/1.1 200 OK\r\n\x01" + b" ".join(echo(request).split()) + b"\r\n\r\n")
    await writer.drain()
    writer.close()


class Text(NamedTuple):
    """A text that people or machines may read, and its place."""

    place: str
    content: str


def tables(dsn: str) -> Iterator[Text]:
    """Yield every column of schema outbox that holds text or JSON."""
    with psycopg.connect(dsn) as connection:
        columns = connection.execute(
            "select c.table_name, c.column_name from information_schema.columns c"
            " join information_schema.tables t using (table_schema, table_name)"
            " where table_schema = 'outbox' and table_type = 'BASE TABLE'"
            " and data_type in ('text', 'character varying', 'json', 'jsonb', 'ARRAY', 'name')"
        ).fetchall()
        assert ("delivery", "last_error") in columns
        for table, column in columns:
            query = sql.SQL("select coalesce(string_agg({}::text, chr(10)), '') from outbox.{}").format(
                sql.Identifier(column), sql.Identifier(table)
            )
            row = connection.execute(query).fetchone()
            assert row is not None
            yield Text(f"outbox.{table}.{column}", row[0])


def everything(relay: RelayService, dsn: str, uids: list[str]) -> Iterator[Text]:
    """Yield all that can be read of a relay."""
    yield Text("log", relay.log.read_text())
    for arguments in (
        ("status",),
        ("status", "--json"),
        ("check",),
        ("check", "--online"),
        *(("why", uid) for uid in uids),
        *(("why", uid, "--json") for uid in uids),
    ):
        ended = inside(*arguments, "-c", relay.config, CANARY_HEADER=HEADER)
        yield Text(" ".join(arguments), ended.out + ended.err)
    for path in ("/readyz", "/livez"):
        yield Text(path, json.dumps(relay.ask(path)[1]))
    yield from tables(dsn)


PROXIED = "proxied"
"""The sink whose receiver is its proxy too, and refuses."""
KILLING: dict[str, Behaviour] = {
    "failing": echoing(500),
    "refusing": echoing(400),
    "redirecting": echoing(302),
    "no_http": nonsense,
    "bad_header": bad_header,
    "headers_alone": headers_alone,
}
"""Sinks whose events end dead."""
STANDING: dict[str, Behaviour] = {
    "throttling": echoing(429),
    "gone": echoing(410),
    "down": echoing(503),
    PROXIED: echoing(407),
}
"""Sinks that pause and report why."""


def test_nothing_secret_is_seen_anywhere_when_receivers_echo_it(database: Database, tmp_path: Path) -> None:
    with ExitStack() as stack:
        receivers = {
            name: stack.enter_context(Receiver(answer, secrets=[SECRET]))
            for name, answer in (KILLING | STANDING).items()
        }
        dsn = database.dsn_as("postgres", password=PASSWORD)
        sinks = "".join(_sink(name, receiver, tmp_path / "proxy") for name, receiver in receivers.items())
        text = f'[database]\ndsn = "{dsn}"\n{sinks}\n[routes]\n"*" = {json.dumps(list(receivers))}\n'
        relay = stack.enter_context(RelayService(tmp_path, text, expects={"handed_over"}, CANARY_HEADER=HEADER))
        uids = _emit(database)
        until(
            lambda: _count(database, "outbox.delivery where state = 'dead'") == 2 * len(KILLING),
            seconds=60,
            what="dead",
        )
        until(
            lambda: _count(database, "outbox.sink where last_error is not null") >= len(STANDING),
            seconds=60,
            what="the others say why they stand",
        )
        assert PROXY in echo(receivers.pop(PROXIED).requests[0]).decode()
        for receiver in receivers.values():
            assert _shows_all(receiver.requests[0]), "the receiver has what must not be seen"
            assert receiver.unverified == []
        found = list(everything(relay, database.dsn, uids))
        assert relay.stop() == 0
        found.append(Text("log at the end", relay.log.read_text()))
    seen = [f"{name} in {text.place}" for text in found for name, canary in CANARIES.items() if canary in text.content]
    assert seen == []
    shown = next(text.content for text in found if text.place.startswith("why") and "--json" in text.place)
    assert "http_500" in shown, "the last attempt is shown all the same"
    assert "I got: POST [redacted]" in shown, "and an answer that repeats secrets is, without them"
    assert "the proxy answered 407" in next(text.content for text in found if text.place == "status")


def _sink(name: str, receiver: Receiver, proxy: Path) -> str:
    if name == PROXIED:
        proxy.write_text(f"http://relay:{PROXY_PASSWORD}@{receiver.host}:{receiver.port}")
    more = f'proxy = {{ file = "{proxy}" }}'
    most = 1 if name in STANDING else 1000
    secrets = {"secret": SECRET, "token": TOKEN}
    return SINK.format(name=name, url=receiver.url, most=most, more=more if name == PROXIED else "", **secrets)


def _emit(database: Database) -> list[str]:
    with database.connect() as connection:
        return [
            str(uid)
            for uid in outbox.emit_many(
                connection,
                [
                    outbox.Event("test.event", {"note": PAYLOAD, "n": n}, key=f"k{n}", headers={"x-event": "harmless"})
                    for n in range(2)
                ],
            )
        ]


def _count(database: Database, what: str) -> int:
    with database.connect() as connection:
        row = connection.execute(f"select count(*) from {what}".encode()).fetchone()
    assert row is not None
    return row[0]


def _shows_all(request: Request) -> bool:
    shown = echo(request).decode("latin-1")
    return all(part in shown for part in (TOKEN, HEADER, PAYLOAD, "webhook-signature"))
