"""The clients of destinations that reloads make: each is closed once, also those that are never used."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.sinks.webhook import WebhookSink
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.received import received_types
from tests.support.receiver.request import Request
from tests.support.relay_config import webhook_config
from tests.support.serving import serve_while
from tests.support.wait import until

RECORDED = "select 1 from outbox.relay where (config ->> 'sinks.crm.max_in_flight')::integer = %s"


class Clients:
    """The webhook clients of this process, counted as they are opened and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.closed = Counter[WebhookSink](), Counter[WebhookSink]()
        opens, closes = WebhookSink.open, WebhookSink.close

        async def counted_open(sink: WebhookSink) -> None:
            self.opened[sink] += 1
            await opens(sink)

        async def counted_close(sink: WebhookSink) -> None:
            self.closed[sink] += 1
            await closes(sink)

        monkeypatch.setattr(WebhookSink, "open", counted_open)
        monkeypatch.setattr(WebhookSink, "close", counted_close)

    def judge(self, made: int) -> None:
        """Raise AssertionError unless ``made`` clients were opened and closed, each once."""
        assert sorted(self.opened.values()) == sorted(self.closed.values()) == [1] * made
        assert self.opened.keys() == self.closed.keys()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(monkeypatch)


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def reload(file: Path, in_flight: int) -> None:
    """Change the limit of requests, for which the client is made again, and send SIGHUP."""
    text = file.read_text().partition("max_in_flight")[0].rstrip() + f"\nmax_in_flight = {in_flight}\n"
    file.write_text(text)
    os.kill(os.getpid(), signal.SIGHUP)


def config(database: Database, receiver: Receiver, directory: Path) -> Path:
    """Write the file of a relay whose last table is the sink's."""
    text = webhook_config(database.dsn, receiver, directory)
    sink, routes = text.index("[sinks.crm]"), text.index("[routes]")
    file = directory / "relay.toml"
    file.write_text(text[:sink] + text[routes:] + text[sink:routes])
    return file


def test_a_client_that_a_later_reload_replaces_before_its_loop_is_closed(
    database: Database, receiver: Receiver, tmp_path: Path, clients: Clients
) -> None:
    """Goes red when the client of the first reload is forgotten while a request of the first loop is under way."""
    file = config(database, receiver, tmp_path)
    release = threading.Event()

    async def answer(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(release.wait, 30)
        await say(200)(request, reader, writer)

    receiver.answer = answer

    def script() -> None:
        emit_types(database, "a.one")
        until(lambda: receiver.requests, seconds=30, what="a request is under way")
        for in_flight in (3, 4, 5):
            reload(file, in_flight)
            until(lambda n=in_flight: query(database, RECORDED, n), seconds=30, what="the reload is applied")
        release.set()
        emit_types(database, "a.two")
        until(lambda: "a.two" in received_types(receiver), seconds=30, what="the last client delivers")

    serve_while(file, script)
    clients.judge(4)
