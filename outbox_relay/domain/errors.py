"""Every exception that the relay raises, in one tree.

    RelayError
      ConfigurationError     the file, the environment or the command line is wrong; exit code 2
      DatabaseUnusable       the database refuses the relay: password, rights, schema; exit code 2
        PositionsMissing     shards of a sink have no position, so it is unknown what was delivered
        RightMissing         the role has no right to something
      NotFound               the named object does not exist; exit code 3
      ArchiveFailed          an archive was not written or not verified; nothing is emptied
      DatabaseUnavailable    the database did not answer; the relay waits and starts a new session
      StatementFailed        one statement failed and its connection did not; only its caller is affected
      SessionReset           the state in memory may be wrong: drop it and start from the stored positions
        Reloaded             the routes of a sink were reloaded
        HandedOver           shards were given up with events in flight
        LeaseLost            a fence found another owner or epoch of a shard
        IncarnationChanged   the server is not the one that earlier reads came from
      SinkStuck              all calls of a sink hang; the process ends with exit code 1, to be started again

An exception means that the outcome is unknown. The answer of a destination is a value: see ``outcomes``.
Messages never contain a payload, a secret or a DSN.
"""

from __future__ import annotations

from typing import ClassVar


class RelayError(Exception):
    """The base class of every exception that the relay raises."""

    reason: ClassVar[str] = "other"
    """The stable label under which session restarts caused by this exception are counted."""


class ConfigurationError(RelayError):
    """A wrong value in the file, the environment or the command line.

    The message names its place and the fix.
    """


class DatabaseUnusable(RelayError):
    """A refusal of the database that waiting does not fix: password, rights, schema."""

    reason = "database_refused"


class PositionsMissing(DatabaseUnusable):
    """Shards without a position, of which it is unknown what was delivered.

    The message names the shards and the fix.
    """


class RightMissing(DatabaseUnusable):
    """A right that the database role does not have.

    ``said`` is the database's message, and ``advice`` the rest of the message of the exception.
    """

    def __init__(self, said: str, advice: str) -> None:
        super().__init__(f"{said}: {advice}")
        self.said = said
        self.advice = advice


class NotFound(RelayError):
    """The object that the command names does not exist."""


class ArchiveFailed(RelayError):
    """An archive that was not written, or that did not hold what was read.

    The message names the address without its query, which is another one at each attempt, and the cause, which is
    the storage's or the system's words without secrets, or the class of the error.
    """

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(f"the archive {address} was not written: {cause}; nothing was emptied")
        self.cause = cause


class DatabaseUnavailable(RelayError):
    """No answer of the database, or none in time.

    The statement may have taken effect.
    """

    reason = "connection_lost"


class StatementFailed(RelayError):
    """A failed statement: a timeout, a lock, or an answer that cannot be loaded.

    The connection and the server are not in doubt, so only the caller is affected. A statement that the client
    abandoned may have taken effect, since its COMMIT may have waited for a standby. ``sqlstate`` is the server's, or
    the closest one if the client failed, or None.
    """

    reason = "statement_failed"

    NO_CONNECTION: ClassVar = "53300"
    """The SQLSTATE of a statement that was not sent because no connection was free for it."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class SinkStuck(RelayError):
    """All calls of a sink hang, and nothing in this process can end them."""


class SessionReset(RelayError):
    """Possibly wrong state of a sink in memory.

    The session drops it and starts from the stored positions.
    """

    reason = "start_again"


class Reloaded(SessionReset):
    """New routes of the sink, with no event in flight; the next session uses them."""

    reason = "reload"


class HandedOver(SessionReset):
    """Shards given up while the destination is down.

    Events in flight cannot be settled.
    """

    reason = "handed_over"


class LeaseLost(SessionReset):
    """A settlement that was not written because a shard has another owner or epoch."""

    reason = "lease_lost"


class IncarnationChanged(SessionReset):
    """A server that restarted, failed over or went back in time since the last tick."""

    reason = "incarnation"


def is_thread_shortage(error: BaseException) -> bool:
    """Return True if the operating system started no thread, by a limit of processes or of memory. Others still run."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)
