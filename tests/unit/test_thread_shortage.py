"""A process that can start no thread for a while: each part that wants one waits or tries again, and none ends it.

The fault is real: a thread with a stack of 64 TiB cannot be started. Threads that run are not affected.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable
from outbox_relay.domain.file_reading import FileReader
from outbox_relay.domain.thread_shortage import is_thread_shortage
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.service import supervisor
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.supervisor import Supervisor
from outbox_relay.settings import load
from outbox_relay.sinks.webhook.exchange import NotConnected
from outbox_relay.sinks.webhook.resolver import Resolver
from tests.support.logs import RecordedLog
from tests.support.wait import auntil

HUGE_STACK = 2**46
NOWHERE = "host=localhost port=1 dbname=shop"


@contextmanager
def no_threads() -> Generator[None]:
    """Let this process start no thread in the block."""
    threading.stack_size(HUGE_STACK)
    try:
        yield
    finally:
        threading.stack_size(0)


def last_thread() -> str:
    """Return a connection string, in a thread after which no other one can be started."""
    threading.stack_size(HUGE_STACK)
    return NOWHERE


@contextmanager
def threads_again() -> Generator[None]:
    """Let this process start threads again after the block."""
    try:
        yield
    finally:
        threading.stack_size(0)


def test_the_shortage_is_recognized_by_what_the_interpreter_says() -> None:
    with no_threads(), pytest.raises(RuntimeError) as raised:
        threading.Thread(target=print).start()
    assert is_thread_shortage(raised.value)
    assert not is_thread_shortage(RuntimeError("cannot schedule new futures after shutdown"))


async def test_a_file_cannot_be_read_meanwhile_and_can_be_read_afterwards() -> None:
    reader = FileReader()
    with no_threads():
        with pytest.raises(ConfigurationError, match="cannot be read: can't start new thread"):
            reader.call(lambda: 1)
        with pytest.raises(ConfigurationError, match="can't start new thread"):
            await reader.acall(lambda: 1)
    assert await reader.acall(lambda: 1) == 1


async def test_a_name_is_looked_up_again_after_a_lookup_without_a_thread() -> None:
    resolver = Resolver("localhost")
    for _ in range(3):
        with no_threads(), pytest.raises(NotConnected, match="no thread"):
            await resolver.addresses()
        resolver.forget()
    assert await resolver.addresses()


async def test_the_relays_own_addresses_remain_known(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnAddresses(load(None, {"OUTBOX_RELAY_HTTP__LISTEN": "127.0.0.1:9180"}, NOWHERE))
    known = own()
    monkeypatch.setattr("outbox_relay.service.own_addresses.CONNECTION_FILES", Reads())
    with no_threads():
        await own.refresh()
    assert own() == known


class Reads(FileReader):
    """A reader whose thread was started before."""

    async def acall(self, function: Callable[[], object]) -> object:  # type: ignore[override]
        """Call the function at once."""
        return function()


async def test_a_database_cannot_be_reached_meanwhile() -> None:
    database = Database(last_thread, pooler=True, connections=1)
    with threads_again(), pytest.raises(DatabaseUnavailable, match="can't start new thread"):
        await database.open()


async def test_no_connection_for_notifications_is_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.postgres.listener.RETRY_SECONDS", 0.0)
    attempts = list[int]()

    def dsn() -> str:
        attempts.append(1)
        return last_thread()

    listener = CommitListener(dsn)

    async def has_tried() -> bool:
        assert not await listener.begin_listening()
        return len(attempts) == wanted

    for wanted in range(1, 4):
        with threads_again():
            await auntil(has_tried, seconds=10, what=f"{wanted} attempts")
    await listener.close()


async def test_a_part_without_a_thread_is_started_again_however_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_MAX_SECONDS", 0.001)
    starts = 0

    async def part() -> None:
        nonlocal starts
        starts += 1
        if starts < 20:
            with no_threads():
                await asyncio.to_thread(print)

    async def reconnect() -> None:
        raise AssertionError

    log = RecordedLog()
    await Supervisor(reconnect, asyncio.Event(), log).supervise("part", part)
    assert starts == 20
    assert {values["reason"] for _, _, values in log.lines} == {"can't start new thread"}
