"""Replays as an operator's script starts them, and the clients that deliver them in a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.database import Database
from tests.support.memory_sink import MemorySink, Script
from tests.support.sink_actions import call
from tests.support.wait import until

ENDED = ("done", "cancelled")


class Clients:
    """Makes memory sinks for replays, and keeps them by the number of the replay."""

    def __init__(self, script: Callable[[], Script] | None = None, **options: Any) -> None:
        self._script = script
        self._options = options
        self.made: list[tuple[int, int, MemorySink]] = []
        """The number of the replay, the maximum of concurrent requests, and the client, the oldest first."""

    def __call__(self, _name: str, replay: int, slots: int) -> MemorySink:
        """Return a new client."""
        script = {"script": self._script()} if self._script else {}
        sink = MemorySink(**script, **self._options, max_in_flight=slots)
        self.made.append((replay, slots, sink))
        return sink

    def delivered(self, replay: int) -> list[Any]:
        """Return the events that were delivered for a replay, client by client."""
        return [event for number, _, sink in self.made if number == replay for event in sink.delivered]

    def ids(self, replay: int) -> list[int]:
        """Return their ids."""
        return [event.id for event in self.delivered(replay)]


def start(
    database: Database, sink: str = "s", *, to: str | None = None, rate: int | None = None, **filter_: Any
) -> int:
    """Start a replay and return its number."""
    [found] = call(
        database,
        "select * from outbox.start_replay(%s, %s, %s, 'tester', null)",
        json.dumps({"sink": sink, **filter_}), to, rate,
    )  # fmt: skip
    return found["id"]


def preview(database: Database, sink: str = "s", *, to: str | None = None, **filter_: Any) -> dict[str, Any]:
    """Return what a replay would deliver."""
    [found] = call(
        database,
        "select * from outbox.preview_replay(%s, %s, 10000, 5, 45)",
        json.dumps({"sink": sink, **filter_}), to,
    )  # fmt: skip
    return found


def act(database: Database, action: str, replay: int) -> bool:
    """Pause, resume or cancel a replay."""
    [found] = call(database, "select outbox.set_replay(%s, %s, 'tester', null) as changed", replay, action)
    return found["changed"]


def tend(database: Database) -> None:
    """Do a step of every replay."""
    call(database, "select outbox_internal.tend_replay(r.id) from outbox.replay r order by r.id")


def show(database: Database, replay: int) -> dict[str, Any]:
    """Return the state and the counts of a replay."""
    [found] = call(database, "select * from outbox.replays(%s)", replay)
    return found


def counts(database: Database, replay: int) -> tuple[int, int, int, int | None]:
    """Return total, delivered, failed and passed by."""
    found = show(database, replay)
    return found["total"], found["delivered"], found["failed"], found["passed_by"]


def ended(database: Database, replay: int, state: str = "done", seconds: float = 30) -> dict[str, Any]:
    """Wait until a replay has ended and nothing of it is left; return its state and counts."""

    def fact() -> bool:
        [found] = call(database, "select cleared, state from outbox.replay where id = %s", replay)
        return found["cleared"] and found["state"] in ENDED

    until(fact, seconds=seconds, what=f"replay {replay} is {state}")
    found = show(database, replay)
    assert found["state"] == state, found
    return found
