"""Reloads: what is refused, what waits for the database, and that nothing of it ends the relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, RestartNeeded
from outbox_relay.service import reload_loop
from outbox_relay.service.reload_loop import ReloadLoop
from tests.support.logs import RecordedLog
from tests.support.wait import auntil


class Lines(RecordedLog):
    """A log that keeps its events with the reasons."""

    @property
    def said(self) -> list[tuple[str, str, object]]:
        """Level, event and reason of every line."""
        return [(level, event, values.get("reason")) for level, event, values in self.lines]


class File:
    """A configuration file, and a database that the configuration is written to."""

    def __init__(self) -> None:
        self.content = "old"
        self.unreadable: Exception | None = None
        self.away: Exception | None = None
        self.refusal: str | None = None
        self.adopted: list[str] = []
        self.tries = 0

    async def read(self) -> str:
        if self.unreadable is not None:
            raise self.unreadable
        return self.content

    async def adopt(self, content: str) -> str | None:
        self.tries += 1
        if self.away is not None:
            raise self.away
        if self.refusal is not None:
            return self.refusal
        self.adopted.append(content)
        return None


@asynccontextmanager
async def running(file: File, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[ReloadLoop[str]]:
    """Run reloads of a file, with short pauses."""
    monkeypatch.setattr(reload_loop, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(reload_loop, "PAUSE_MAX_SECONDS", 0.01)
    reloads = ReloadLoop(file.read, file.adopt, lines)
    task = asyncio.create_task(reloads.run())
    try:
        yield reloads
        assert not task.done(), "a reload ended the part"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def becomes(fact: Callable[[], bool], what: str) -> None:
    """Wait until `fact` holds."""

    async def holds() -> bool:
        return fact()

    await auntil(holds, seconds=20, what=what)


@pytest.mark.parametrize(
    "error",
    [ConfigurationError("bad"), KeyError("bad"), OSError("bad"), MemoryError(), RuntimeError("bad")],
    ids=lambda e: type(e).__name__,
)
async def test_whatever_reading_raises_is_said_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    file, lines = File(), Lines()
    file.unreadable = error
    async with running(file, lines, monkeypatch) as reloads:
        assert reloads.last_successful
        reloads.request()
        await becomes(lambda: bool(lines.said), "it is refused")
        assert not reloads.last_successful
        file.unreadable = None
        reloads.request()
        await becomes(lambda: reloads.last_successful, "the good one is taken")
    assert file.adopted == ["old"]
    refused = ("error", "config.reload_refused", str(error) or "MemoryError")
    assert lines.said == [refused, ("info", "config.reloaded", None)]


async def test_a_right_file_that_needs_a_restart_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    file, lines = File(), Lines()
    file.unreadable = RestartNeeded("retention.keep_days: needs a restart")
    async with running(file, lines, monkeypatch) as reloads:
        reloads.request()
        await becomes(lambda: bool(lines.said), "the restart is named")
        assert not reloads.last_successful
    assert lines.said == [("warning", "config.restart_needed", "retention.keep_days: needs a restart")]


@pytest.mark.parametrize("error", [DatabaseUnavailable("away"), RuntimeError("away")], ids=lambda e: type(e).__name__)
async def test_what_was_read_is_tried_until_it_is_confirmed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    file, lines = File(), Lines()
    file.content, file.away = "new", error
    async with running(file, lines, monkeypatch) as reloads:
        reloads.request()
        await becomes(lambda: file.tries >= 5, "it is tried again and again")
        assert not reloads.last_successful
        file.content = "changed on disk, without a signal"
        file.away = None
        await becomes(lambda: reloads.last_successful, "it is confirmed")
    assert file.adopted == ["new"]
    assert lines.said == [
        ("warning", "config.reload_pending", "away"),
        ("info", "config.reloaded", None),
    ]


async def test_a_newer_request_replaces_what_waits_and_one_that_is_refused_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database may know what waits already: given up, the relay would be superseded by itself."""
    file, lines = File(), Lines()
    file.content, file.away = "first", DatabaseUnavailable("away")
    async with running(file, lines, monkeypatch) as reloads:
        reloads.request()
        await becomes(lambda: file.tries >= 2, "the first waits")
        file.content = "second"
        reloads.request()
        tries = file.tries
        await becomes(lambda: file.tries >= tries + 3, "the second waits")
        file.unreadable = ConfigurationError("bad")
        reloads.request()
        await becomes(lambda: lines.said[-1][0] == "error", "the third is refused")
        file.away = None
        await becomes(lambda: bool(file.adopted), "what waited is confirmed")
        assert not reloads.last_successful, "the newest one was refused"
    assert file.adopted == ["second"]


async def test_what_the_database_shows_to_be_impossible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file, lines = File(), Lines()
    file.refusal = "sinks.crm: was removed"
    async with running(file, lines, monkeypatch) as reloads:
        reloads.request()
        await becomes(lambda: bool(lines.said), "it is refused")
        assert not reloads.last_successful
    assert lines.said == [("error", "config.reload_refused", file.refusal)]
    assert file.tries == 1
