"""The schedules of one relay's file: registered at the start, and taken back from a relay that has left.

The relay that started or was reloaded last decides, as for the routes of a sink. A relay whose definition was replaced
so waits until no live relay has the one in force, and then registers its own again: the relays that stay win.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.postgres.schedules import OtherGeneration
from outbox_relay.postgres.store import Store

HOLD_SECONDS = 5.0
"""Interval at which the generations in the database are compared with those that this relay knows."""
UNHELD_LOOKS = 3
"""Number of consecutive comparisons that must find no relay with the definition in force."""

MOST_NAMED = 20
"""Maximum number of schedules that a line of the log names."""

Definition = Mapping[str, Any]
"""A schedule, as ``register_schedules`` takes it."""


class ScheduleDefinitions:
    """The definitions of one relay's file, of which ``wanted`` are the first."""

    def __init__(self, store: Store, relay: UUID, wanted: Sequence[Definition], log: BoundLogger) -> None:
        self._store = store
        self._relay = relay
        self._wanted = wanted
        self._log = log
        self._known: dict[str, int] = {}
        """The generation under which this relay has registered, or found, its own definition of each schedule."""
        self._others: dict[str, tuple[int, int]] = {}
        """Generations of other definitions in force, each with the number of looks at which no relay had it."""
        self._held_at = float("-inf")
        self._known_in: str | None = None
        """The server's incarnation at the last look."""
        self._present: set[str] = set()
        """The schedules of the file that the database had then."""
        self.registered = False
        """True once the database has the schedules of the file."""

    def use(self, wanted: Sequence[Definition]) -> None:
        """Register the definitions of a reload at the next call of ``keep``, also those that are as before."""
        self._wanted = wanted
        self.registered = False

    def keep(self) -> None:
        """Register the schedules of the file, or compare them with those in force. Raises as ``Store``."""
        wanted = self._wanted
        if not self.registered:
            self._known = self._store.register_schedules(wanted) if wanted else {}
            self._others, self._held_at = {}, float("-inf")
            self.registered = wanted is self._wanted
            self._known_in = None
        if (wanted or self._held_at == float("-inf")) and time.monotonic() - self._held_at >= HOLD_SECONDS:
            self._compare(self._store.hold_schedules(self._relay, self._known))
            self._look_for_missing()
            self._held_at = time.monotonic()

    def _look_for_missing(self) -> None:
        """Register the schedules that the database had under the previous server: its state may be an earlier one.

        Those that it has are left alone. Other relays may have changed them since. What is missing although the server
        is the same was removed by a person.
        """
        server, present = self._store.known_schedules([each["name"] for each in self._wanted])
        if self._known_in not in (None, server):
            missing = [each for each in self._wanted if each["name"] in self._present - present]
            if missing:
                self._known |= self._store.register_schedules(missing)
                names = [each["name"] for each in missing]
                self._log.warning("schedules.registered_again", schedules=names[:MOST_NAMED], count=len(names))
                present |= set(names)
        self._known_in, self._present = server, present

    def _compare(self, found: Iterable[OtherGeneration]) -> None:
        """Adopt the generations of definitions that are ours, and replace those that no live relay has."""
        own = {each["name"]: each for each in self._wanted}
        others: dict[str, tuple[int, int]] = {}
        asked: list[dict[str, Any]] = []
        new: list[str] = []
        for other in (each for each in found if each.name in own):
            generation, unheld = self._others.get(other.name, (None, 0))
            is_new = generation != other.generation
            unheld = 0 if other.held else 1 if is_new else unheld + 1
            others[other.name] = other.generation, unheld
            if is_new or unheld >= UNHELD_LOOKS:
                asked.append({**own[other.name], "seen": other.generation, "over": unheld >= UNHELD_LOOKS})
            if is_new:
                new.append(other.name)
        taken = self._store.take_schedules(asked) if asked else {}
        self._others = {name: other for name, other in others.items() if name not in taken}
        self._known.update(taken)
        if superseded := [name for name in new if name not in taken]:
            self._log.warning("schedules.superseded", schedules=superseded[:MOST_NAMED], count=len(superseded))
        if back := [name for name in taken if taken[name] != others[name][0]]:
            self._log.warning("schedules.taken_back", schedules=back[:MOST_NAMED], count=len(back))
