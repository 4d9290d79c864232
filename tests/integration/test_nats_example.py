"""The example of a plug-in, in a relay, against a real server of NATS with the faults that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from nats_harness import STREAM, make_stream, messages, received
from nats_server import PROGRAM, NatsServer
from outbox_relay.sinks.contract import Received
from tests.support.database import Database, query
from tests.support.installed import absent
from tests.support.nats_example import registered
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.stream]
type = "nats"
server = "{server}"
stream = "{stream}"
subject = "shop.{{type}}"
timeout_seconds = 3
[sinks.stream.retry]
attempts = 3
base_seconds = 0.2
max_seconds = 0.5
[sinks.stream.circuit]
open_after = 3
probe_seconds = 0.2
probe_max_seconds = 0.5
[routes]
"*" = ["stream"]
"""
ROWS = "select uid::text, state::text, attempts, last_error from outbox.delivery order by id"


@pytest.fixture(scope="module")
def shared_server() -> Generator[NatsServer]:
    try:
        server = NatsServer()
        server.start()
    except FileNotFoundError:
        absent(PROGRAM, PROGRAM)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: NatsServer) -> NatsServer:
    """Return a server that runs, with an empty stream."""
    shared_server.start()
    asyncio.run(make_stream(shared_server, "shop.>"))
    return shared_server


def relay_of(database: Database, server: NatsServer, directory: Path, *, stream: str = STREAM) -> RelayService:
    text = CONFIG.format(dsn=database.dsn, server=server.url, stream=stream)
    return RelayService(directory, text, PYTHONPATH=registered(directory))


def emit(database: Database, count: int, *, kind: str = "order.made", prefix: str = "k") -> list[tuple[str, str]]:
    """Emit events of several keys, each in a transaction, and return their keys and uids."""
    found: list[tuple[str, str]] = []
    with database.connect() as connection:
        for number in range(count):
            key = f"{prefix}{number % 4}"
            row = connection.execute("select outbox.emit(%s, '{}', key => %s)::text", (kind, key)).fetchone()
            assert row is not None
            found.append((key, row[0]))
            connection.commit()
    return found


def stored(server: NatsServer) -> list[Received]:
    return [received(message) for message in asyncio.run(messages(server))]


def all_stored(server: NatsServer, events: list[tuple[str, str]]) -> None:
    """Wait until the stream has every event once, those of a key in order."""

    until(lambda: len(stored(server)) >= len(events), seconds=60, what="the stream has all events")
    found = [(each.key, each.uid) for each in stored(server)]
    assert len(found) == len(events)
    for key in {key for key, _ in events}:
        assert [uid for k, uid in found if k == key] == [uid for k, uid in events if k == key]


def rows(database: Database) -> list[tuple[Any, ...]]:
    return query(database, ROWS)


@pytest.mark.slow  # the next one ends it once
def test_a_server_that_is_killed_again_and_again_has_every_event_once_and_in_order(
    database: Database, server: NatsServer, tmp_path: Path
) -> None:
    with relay_of(database, server, tmp_path) as relay:
        events: list[tuple[str, str]] = []
        for count in (100, 500, 900):
            events += emit(database, 500)
            becomes_stored(server, count)
            server.kill()
            server.start()
        all_stored(server, events)
        assert relay.stop() == 0
    assert rows(database) == []


def becomes_stored(server: NatsServer, count: int) -> None:
    until(lambda: len(stored(server)) >= count, seconds=60, what=f"{count} events are stored")


@pytest.mark.slow
def test_an_event_whose_subject_no_stream_takes_waits_with_the_reason_and_others_flow(
    database: Database, server: NatsServer, tmp_path: Path
) -> None:
    asyncio.run(make_stream(server, "shop.order.>"))
    with relay_of(database, server, tmp_path) as relay:
        [(_, lost)] = emit(database, 1, kind="payment.made", prefix="p")
        events = emit(database, 20)
        all_stored(server, events)
        said = "no stream takes the subject shop.payment.made"
        until(
            lambda: [row[:1] + row[3:] for row in rows(database)] == [(lost, said)], seconds=60, what="the event waits"
        )
        [row] = rows(database)
        assert row[1:3] == ("waiting", 0)
        asyncio.run(make_stream(server, "shop.>"))
        until(lambda: rows(database) == [], seconds=60, what="the event is delivered")
        assert [each.uid for each in stored(server)] == [lost]
        assert relay.stop() == 0
