"""Every exception the relay raises, in one tree.

    RelayError
      Misconfigured          the file, the environment or the command line; exit code 2
      Unusable               the database answers, but not to us: password, rights, schema; exit code 2
        PositionsMissing     shards of a sink have no position: what was delivered is unknown
      NotFound               what was asked for is not there; exit code 3
      DatabaseLost           the database could not be asked; the relay waits and starts again
      StatementFailed        one statement failed, its connection did not: only the caller is concerned
      StartAgain             what is held in memory may be wrong: drop it, start again from the ledger
        Reloaded             the routes of a sink were reloaded
        HandedOver           shards were given up while the destination is down
        LeaseLost            a fence found that a shard is somebody else's
        IncarnationChanged   the server is not the one that was read from before

Exceptions mean "could not find out". What a destination answers is a value: see ``policy``.
Messages never hold a payload, a secret or a DSN.
"""

from __future__ import annotations

from typing import ClassVar


class RelayError(Exception):
    """Whatever the relay raises by itself."""

    reason: ClassVar[str] = "other"
    """Why the session of a sink ended, in a word or two that do not change: restarts are counted by it."""


class Misconfigured(RelayError):
    """A value in the file, the environment or the command line is wrong; the message names its place and the fix."""


class Unusable(RelayError):
    """The database refuses us for a reason that waiting does not mend: password, rights or schema."""

    reason = "database_refused"


class PositionsMissing(Unusable):
    """Shards of a sink have no position, so it is unknown what was delivered; the message names them and the fix."""


class NotFound(RelayError):
    """What the command names does not exist."""


class DatabaseLost(RelayError):
    """No answer from the database, or none in time; whether the statement took effect is unknown."""

    reason = "connection_lost"


class StatementFailed(RelayError):
    """The database answered, but this statement failed: it ran out of time, met a lock, or its answer cannot be loaded.

    Says nothing about the connection or the server, so it concerns the caller alone. A statement that the client gave
    up may have taken effect: its COMMIT may have waited for a standby. ``sqlstate`` is the server's, or the nearest one
    where the client failed; None when there is none.
    """

    reason = "statement_failed"

    NO_CONNECTION: ClassVar = "53300"
    """The SQLSTATE of a statement that was not sent, since no connection was free for it: nothing is wrong with it."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class StartAgain(RelayError):
    """What this process holds of a sink may be wrong: it is dropped and read again from the ledger."""

    reason = "start_again"


class Reloaded(StartAgain):
    """The sink has other routes from now on: nothing is in hand, and the next session reads with them."""

    reason = "reload"


class HandedOver(StartAgain):
    """Shards were given up while the destination is down, so nothing in hand can be settled."""

    reason = "handed_over"


class LeaseLost(StartAgain):
    """A settlement was refused: at least one of its shards has another owner or epoch. Nothing was written."""

    reason = "lease_lost"


class IncarnationChanged(StartAgain):
    """The server restarted, failed over or went back in time since the last tick."""

    reason = "incarnation"
