"""Parts of a process: after which errors they are started again, and when the process gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, DatabaseUnusable, Reloaded, SessionReset
from outbox_relay.service import supervisor
from outbox_relay.service.supervisor import OUT_OF_MEMORY_MAX, Supervisor
from tests.support.logs import RecordedLog


class Part:
    """A part that raises these errors, one for each start, and then returns."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self._errors: Iterator[Exception] = iter(errors)
        self.starts = 0

    async def run(self) -> None:
        self.starts += 1
        for error in self._errors:
            raise error


class Process:
    """A supervisor that pauses for a millisecond at most, and all that it does to a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "PAUSE_MAX_SECONDS", 0.001)
        self.log = RecordedLog()
        self.stopping = asyncio.Event()
        self.reconnects = 0
        self.supervisor = Supervisor(self._reconnect, self.stopping, self.log)

    async def _reconnect(self) -> None:
        self.reconnects += 1

    async def supervise(self, *errors: Exception) -> int:
        """Run a part that raises ``errors``; return how often it was started."""
        part = Part(errors)
        await self.supervisor.supervise("part", part.run)
        return part.starts


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


async def test_a_part_is_started_again_after_what_a_service_survives(process: Process) -> None:
    assert await process.supervise(DatabaseUnavailable("away"), SessionReset("old"), DatabaseUnusable("refused")) == 4
    assert process.reconnects == 1
    assert process.supervisor.exit_code == 0
    assert [(level, event, values["reason"], values["cause"]) for level, event, values in process.log.lines] == [
        ("warning", "part.restarted", "away", DatabaseUnavailable.reason),
        ("warning", "part.restarted", "old", SessionReset.reason),
        ("warning", "part.restarted", "refused", DatabaseUnusable.reason),
    ]


async def test_a_reload_is_logged_as_no_error(process: Process) -> None:
    part = Part([Reloaded("the configuration was reloaded")] * 2)
    await process.supervisor.supervise("part", part.run, sink="crm")
    said = ("info", "sink.reloaded", {"sink": "crm", "reason": "the configuration was reloaded"})
    assert (part.starts, process.log.lines) == (3, [said] * 2)


async def test_a_cause_that_recurs_is_logged_once(process: Process) -> None:
    assert await process.supervise(*[SessionReset("old")] * 3) == 4
    assert [values["cause"] for _, _, values in process.log.lines] == [SessionReset.reason]


async def test_another_error_ends_the_process(process: Process) -> None:
    with pytest.raises(KeyError):
        await process.supervise(KeyError("a defect"))


async def test_a_part_that_fails_while_the_process_stops_is_not_started_again(process: Process) -> None:
    process.stopping.set()
    assert await process.supervise(DatabaseUnavailable("away")) == 1
    assert process.log.lines == []


async def test_a_part_without_memory_ends_the_process(process: Process) -> None:
    assert await process.supervise(*[MemoryError()] * (OUT_OF_MEMORY_MAX + 1)) == OUT_OF_MEMORY_MAX
    assert process.stopping.is_set()
    assert process.supervisor.exit_code == 1
    assert process.log.lines[-1][:2] == ("error", "relay.gave_up")


async def test_only_consecutive_errors_of_memory_count(process: Process) -> None:
    errors = [MemoryError()] * (OUT_OF_MEMORY_MAX - 1)
    assert await process.supervise(*errors, SessionReset("old"), *errors) == 2 * OUT_OF_MEMORY_MAX
    assert process.supervisor.exit_code == 0


async def test_a_part_that_ran_well_begins_with_a_clean_record(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", -1.0)  # any run is long enough
    assert await process.supervise(*[MemoryError()] * 2 * OUT_OF_MEMORY_MAX) == 2 * OUT_OF_MEMORY_MAX + 1
    assert process.supervisor.exit_code == 0


async def test_a_start_waits_for_the_database_but_not_for_its_consent(process: Process) -> None:
    part = Part([DatabaseUnavailable("away"), SessionReset("old"), DatabaseUnusable("password")])
    with pytest.raises(DatabaseUnusable):
        await process.supervisor.retry("the database cannot be reached yet", part.run)
    assert part.starts == 3
    with pytest.raises(ConfigurationError):
        await process.supervisor.retry("the database cannot be reached yet", Part([ConfigurationError("bad")]).run)
