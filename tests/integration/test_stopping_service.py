"""The end of a process that cannot finish: nothing of it stays in the way of the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outbox_relay import settings
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.postgres.migrations import rebase
from outbox_relay.service.process import Service
from outbox_relay.service.supervisor import OUT_OF_MEMORY_MAX
from outbox_relay.sinks.webhook import WebhookSink
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.receiver import Receiver
from tests.support.receiver.faults import hang
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import becomes, until


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


def service(database: Database, receiver: Receiver, directory: Path) -> Service:
    """Return a relay in this process."""
    file = directory / "relay.toml"
    file.write_text(webhook_config(database.dsn, receiver, directory))
    return Service(settings.load(file, {}), lambda: settings.load(file, {}))


async def ended(serving: asyncio.Task[int]) -> int:
    """Wait until the relay has ended; its exit code."""
    try:
        return await asyncio.wait_for(serving, 40)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_session_without_memory_starts_again(
    database: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starved(OUT_OF_MEMORY_MAX - 1).install(monkeypatch)
    serving = asyncio.create_task(service(database, receiver, tmp_path).serve())
    await becomes(lambda: query(database, "select 1 from outbox.sink"), "the sink is known")
    emit_types(database, "a.one")
    await becomes(lambda: received_types(receiver) == ["a.one"], "it is delivered")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await ended(serving) == 0


async def test_a_relay_that_never_has_memory_gives_up_in_order(
    database: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Starved(float("inf")).install(monkeypatch)
    serving = asyncio.create_task(service(database, receiver, tmp_path).serve())
    await becomes(lambda: query(database, "select 1 from outbox.sink"), "the sink is known")
    emit_types(database, "a.one")
    assert await ended(serving) == 1
    assert received_types(receiver) == []
    assert query(database, "select count(*) from outbox.relay") == [(0,)]
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
