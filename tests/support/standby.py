"""A standby of an embedded PostgreSQL server, to be promoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from psycopg.conninfo import make_conninfo

from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.embedded.postgres import SUPERUSER, PostgresServer, Setting
from outbox_relay.workbench.embedded.process import ProcessFailed

NAME = "standby"
"""The name under which a standby connects, for `synchronous_standby_names`."""
COPY_SECONDS = 120
PROMOTE_SECONDS = 30


class StandbyServer(PostgresServer):
    """A copy of `primary` that streams from it."""

    def __init__(
        self, primary: PostgresServer, settings: Mapping[str, Setting] | None = None, *, fsync: bool = False
    ) -> None:
        super().__init__(settings, fsync=fsync)
        self._primary = primary

    def prepare(self) -> None:
        """Copy the primary. Raise :class:`ProcessFailed` if that fails."""
        copy = self._run(self._copy_command(), self.directory / "basebackup.log")
        try:
            if copy.wait(COPY_SECONDS) != 0:
                raise ProcessFailed(f"the copy of the primary ended with {copy.exit_code}: {copy.log_tail()}")
        finally:
            copy.end(seconds=self.stop_seconds)
        # The copy must not wait for itself once it is a primary.
        (self.data / "postgresql.auto.conf").write_text(
            f"primary_conninfo = '{primary_conninfo(self._primary.port)}'\n"
        )
        (self.data / "standby.signal").touch()

    def promote(self) -> None:
        """Make it a primary and return when it takes writes. Raise :class:`ProcessFailed` if that takes too long."""
        with self.connect() as connection:
            row = connection.execute("select pg_promote(true, %s)", (PROMOTE_SECONDS,)).fetchone()
        if row != (True,):
            raise ProcessFailed(f"the standby was not promoted within {PROMOTE_SECONDS} s: {self.process.log_tail()}")

    def _copy_command(self) -> Sequence[str | Path]:
        return [
            self.bin("pg_basebackup"), "--pgdata", self.data, "--host", LOOPBACK, "--port", str(self._primary.port),
            "--username", SUPERUSER, "--wal-method", "stream", "--checkpoint", "fast", "--no-sync", "--no-manifest",
        ]  # fmt: skip


def primary_conninfo(port: int) -> str:
    """Return the connection string of a standby whose primary listens on `port`."""
    return make_conninfo(host=LOOPBACK, port=port, user=SUPERUSER, application_name=NAME)
