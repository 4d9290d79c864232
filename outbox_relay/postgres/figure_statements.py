"""Statements on figures of the database and on the history, each within limits of its own.

Each is sent as one message with its limits, so that the server ends it and its connection is not lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple
from uuid import UUID

from outbox_relay.postgres.database import Database

_LIMITS: Final[tuple[LiteralString, ...]] = (
    "set local statement_timeout = '1s'",
    "set local lock_timeout = '100ms'",
    "set local synchronous_commit = off",
)
"""Limits of each statement. Its commit waits for no disk: figures that a crash takes are measured again."""


class FiguresClaim(NamedTuple):
    """The answer to a claim: a token, or None while another relay measures, and the database's POSIX time."""

    token: UUID | None
    now: float


class FigureStatements(Database):
    """Figures that one relay measures for all, and the history that each adds to."""

    def claim_figures(self, relay: UUID, seconds: float) -> FiguresClaim:
        """Claim the measuring of figures for ``seconds``."""
        [row] = self.measure("claim_figures", {"relay": relay, "seconds": seconds})
        return FiguresClaim(*row)

    def store_figures(self, relay: UUID, token: UUID, figures: Mapping[str, Any]) -> bool:
        """Store figures for every relay. Return False if the claim has lapsed."""
        parameters = {"relay": relay, "token": token, "figures": json.dumps(figures)}
        [(stored,)] = self.measure("store_figures", parameters)
        return stored

    def stored_figures(self) -> tuple[object, float]:
        """Return the stored figures, which any version may have written, and the database's POSIX time."""
        found = self.measure("stored_figures", {})
        return (found[0].figures, found[0].now) if found else (None, 0.0)

    def add_history(self, minute: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of sinks to the present minute of the history."""
        self.measure("add_history", {"minute": json.dumps(minute)})

    def measure(self, name: str, parameters: Mapping[str, Any]) -> list[Any]:
        """Return the rows of a statement file as named tuples.

        The server ends it after a second, or after 0.1 s of waiting for a lock.
        """
        return self._message(_LIMITS, name, parameters)
