"""The end of a process that cannot finish: nothing of it stays in the way of the next one."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.postgres.migrations import rebase
from outbox_relay.sinks.webhook import WebhookSink
from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.faults import hang
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config, webhook_with_files_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.serving import serve_while
from tests.support.wait import until


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def test_a_stop_that_runs_out_of_time_leaves_nothing_behind(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """Goes red when only a stop in time takes the relay's row away: rebase then refuses for half a minute."""
    receiver.answer = hang
    text = webhook_config(database.dsn, receiver, tmp_path).replace(
        "[sinks.crm]", "stop_after_seconds = 1\n[sinks.crm]"
    )
    with RelayService(tmp_path, text) as relay:
        emit_types(database, "a.one", "a.two")
        until(lambda: query(database, "select 1 from outbox.delivery having count(*) = 2"), seconds=20, what="rows")
        emit_types(database, "a.three")
        until(lambda: len(receiver.requests) == 3, seconds=20, what="requests are under way")
        assert relay.stop() == 0
        said = [line["event"] for line in relay.lines() if "event" in line]
    assert said[-1] == "relay.stopped"
    assert "relay.stop_incomplete" in said
    assert query(database, "select count(*) from outbox.relay") == [(0,)]
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
    assert query(database, "select count(*) from outbox.delivery where lease is not null") == [(0,)]
    rebase(database.dsn)


def test_a_stop_ends_in_time_if_neither_database_nor_destination_answers(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """Goes red when a last step waits for an answer as long as usual."""
    receiver.answer = hang
    with Proxy() as proxy:
        proxy.target = database.server.port
        dsn = make_conninfo(host=LOOPBACK, port=proxy.port, dbname=database.name, user="postgres")
        text = webhook_with_files_config(f'dsn = "{dsn}"', receiver.url, tmp_path)
        text = text.replace("[relay]", "[relay]\nstop_after_seconds = 1")
        with RelayService(tmp_path, text, expects=LOST, CRM_TOKEN="x") as relay:
            emit_types(database, "a.one", "a.two")
            until(lambda: len(receiver.requests) == 2, seconds=20, what="requests are under way")
            proxy.swallowing = True
            proxy.blackhole()
            began = time.monotonic()
            relay.send(signal.SIGTERM)
            assert relay.ended(20) == 0
            assert time.monotonic() - began < 1.0 + 2.0 + 1.5, "the end of the interpreter takes a while"
            said = [line["event"] for line in relay.lines() if "event" in line]
    assert said[-1] == "relay.stopped"
    assert {"relay.stop_incomplete", "relay.left_behind"} <= set(said)


UNREGISTERED = "select 1 where not exists (select from outbox.relay)"


class Starved:
    """Deliveries for which there is no memory: a mock of the sink's one call."""

    def __init__(self, times: float) -> None:
        self.left = times
        self.deliver = WebhookSink.deliver

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        starved = self

        async def deliver(sink: WebhookSink, batch: Sequence[StoredEvent], *arguments: Any) -> Sequence[Verdict]:
            if starved.left > 0:
                starved.left -= 1
                raise MemoryError
            return await starved.deliver(sink, batch, *arguments)

        monkeypatch.setattr(WebhookSink, "deliver", deliver)


def config(database: Database, receiver: Receiver, directory: Path) -> Path:
    """Write the file of a relay."""
    file = directory / "relay.toml"
    file.write_text(webhook_config(database.dsn, receiver, directory))
    return file


def test_a_relay_that_never_has_memory_ends_in_order(
    database: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starved(float("inf")).install(monkeypatch)

    def script() -> None:
        until(lambda: query(database, "select 1 from outbox.sink, outbox.relay"), seconds=30, what="both are known")
        emit_types(database, "a.one")
        until(lambda: query(database, UNREGISTERED), seconds=30, what="the relay has left")

    with pytest.raises(MemoryError):
        serve_while(config(database, receiver, tmp_path), script)
    assert received_types(receiver) == []
    assert query(database, UNREGISTERED)
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
