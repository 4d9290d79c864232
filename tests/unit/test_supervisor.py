"""Parts of a process: after which errors they are started again, and when the process ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import pytest

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, DatabaseUnusable, SessionReset
from outbox_relay.service import supervisor
from outbox_relay.service.supervisor import OUT_OF_MEMORY_MAX, Supervisor
from tests.support.logs import RecordedLog


class Part:
    """A part that raises these errors, one for each start, and then returns."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self._errors: Iterator[Exception] = iter(errors)
        self.starts = 0

    def run(self) -> None:
        self.starts += 1
        for error in self._errors:
            raise error


class Process:
    """A supervisor that pauses for a millisecond at most, and its log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "PAUSE_MAX_SECONDS", 0.001)
        self.log = RecordedLog()
        self.supervisor = Supervisor(self.log)

    def starts(self, *errors: Exception) -> int:
        """Run a part that raises ``errors``; return how often it was started."""
        part = Part(errors)
        thread = self.supervisor.start("part", part.run)
        thread.join(10)
        assert not thread.is_alive()
        return part.starts


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_a_part_is_started_again_after_what_a_service_survives(process: Process) -> None:
    assert process.starts(DatabaseUnavailable("away"), SessionReset("old"), DatabaseUnusable("refused")) == 4
    assert process.supervisor.failure is None
    assert [(level, event, values["reason"], values["cause"]) for level, event, values in process.log.lines] == [
        ("warning", "part.restarted", "away", DatabaseUnavailable.reason),
        ("warning", "part.restarted", "old", SessionReset.reason),
        ("warning", "part.restarted", "refused", DatabaseUnusable.reason),
    ]


def test_another_error_ends_the_process(process: Process) -> None:
    assert process.starts(error := KeyError("a defect"), SessionReset("old")) == 1
    assert process.supervisor.failure is error
    assert process.supervisor.stopping.is_set()
    assert process.log.lines[-1][:2] == ("error", "relay.gave_up")


def test_a_part_that_exits_ends_the_process_with_an_error(process: Process) -> None:
    """Goes red when the thread of a sink ends silently: its shards stay claimed, and no relay delivers."""
    process.supervisor.start("part", lambda: sys.exit(0)).join(10)
    assert process.supervisor.stopping.is_set()
    assert isinstance(process.supervisor.failure, RuntimeError)


def test_a_part_that_fails_while_the_process_stops_is_not_started_again(process: Process) -> None:
    process.supervisor.stopping.set()
    assert process.starts(DatabaseUnavailable("away")) == 1
    assert process.log.lines == []


def test_a_part_without_memory_ends_the_process(process: Process) -> None:
    errors = [MemoryError()] * (OUT_OF_MEMORY_MAX - 1)
    assert process.starts(*errors, SessionReset("old"), *errors) == 2 * OUT_OF_MEMORY_MAX
    assert process.supervisor.failure is None, "only errors in a row count"
    assert process.starts(*errors, MemoryError(), MemoryError()) == OUT_OF_MEMORY_MAX
    assert isinstance(process.supervisor.failure, MemoryError)


def test_a_start_waits_for_the_database_but_not_for_its_consent(process: Process) -> None:
    part = Part([DatabaseUnavailable("away"), SessionReset("old"), DatabaseUnusable("password")])
    with pytest.raises(DatabaseUnusable):
        process.supervisor.retry("database.unreachable", part.run)
    assert part.starts == 3
    with pytest.raises(ConfigurationError):
        process.supervisor.retry("database.unreachable", Part([ConfigurationError("bad")]).run)
