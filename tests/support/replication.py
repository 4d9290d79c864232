"""Two PostgreSQL servers, of which one replicates the other: promoted, replaced, stopped and held back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from outbox_relay.workbench.embedded.postgres import Setting
from tests.support.postgres import PostgresServer
from tests.support.standby import NAME, StandbyServer, primary_conninfo
from tests.support.volume import Volume
from tests.support.wait import until

REPLAYED = "select replay_lsn >= %s::pg_lsn from pg_stat_replication where application_name = %s"
CATCH_UP_SECONDS = 60
"""Longest time until a standby streams."""
REPLICATION: Mapping[str, Setting] = {"wal_keep_size": "512MB", "wal_retrieve_retry_interval": "100ms"}
"""A standby that was away for a while finds what it missed, and looks for its primary often."""
STATES = "select state, sync_state from pg_stat_replication where application_name = %s"
Mode = Literal["synchronous", "asynchronous"]


class Standby(StandbyServer, PostgresServer):
    """A copy of `primary` that streams from it. `port` is a free one unless it takes the place of another server."""

    def __init__(
        self, primary: PostgresServer, settings: Mapping[str, Setting] | None = None, *, port: int | None = None
    ) -> None:
        self._primary = primary
        PostgresServer.__init__(self, settings, major=primary.major)
        self._given_port = port
        self.port = port or self.port

    def detach(self) -> None:
        """Receive nothing more: what is committed from now on it lacks."""
        with self.connect() as connection:
            connection.execute(f"alter system set primary_conninfo = '{primary_conninfo(1)}'".encode())
            connection.execute("select pg_reload_conf()")

    def start_first(self) -> None:
        """Start on the given port, or on some free one."""
        if self._given_port is None:
            super().start_first()
        else:
            self.start()


class Pair:
    """A primary and its standby, on two ports that stay the same when the roles change.

    `mode` is "synchronous", a commit waits for the standby to have flushed it, or "asynchronous". As a context manager
    both are made, started, and removed at the end. With `volume_megabytes` each has a file system of its own, which
    can be filled (see :class:`tests.support.volume.Volume`).
    """

    def __init__(
        self,
        mode: Mode = "synchronous",
        settings: Mapping[str, Setting] | None = None,
        *,
        volume_megabytes: int | None = None,
    ) -> None:
        self.mode = mode
        self._volume_megabytes = volume_megabytes
        self._volumes: dict[PostgresServer, Volume] = {}
        self._made: list[PostgresServer] = []
        self._fallen: PostgresServer | None = None
        self._settings: dict[str, Setting] = {**REPLICATION, **(settings or {})}
        self._stack = ExitStack()
        self.primary: PostgresServer = PostgresServer(self._settings)
        self.standby: Standby | None = None

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(self._close)
            self._make(self.primary)
            self.attach()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def servers(self) -> list[PostgresServer]:
        """Those that there are now, the primary first."""
        return [self.primary, *([self.standby] if self.standby else [])]

    @property
    def ports(self) -> list[int]:
        """Both ports, in an order that does not tell which is the primary's."""
        return sorted(server.port for server in self.servers)

    def attach(self, port: int | None = None) -> None:
        """Give the primary a standby, and commits that wait for it if the mode says so."""
        self.standby = Standby(self.primary, self._settings, port=port)
        self._make(self.standby)
        self.wait_for_standby("streaming")
        if self.mode == "synchronous":
            self.set_synchronous(NAME)
            self.wait_for_standby("sync")

    def fail_over(self) -> None:
        """Kill the primary and promote the standby. Commits are not synchronous until there is a standby again."""
        assert self.standby is not None, "there is no standby"
        self._fallen, self.primary, self.standby = self.primary, self.standby, None
        self._fallen.kill()
        self.primary.promote()

    def replace(self) -> None:
        """Remove the server that failed and put a new standby at its port."""
        assert self._fallen is not None, "no server has failed"
        fallen, self._fallen = self._fallen, None
        self.remove(fallen)
        self.attach(port=fallen.port)

    def prepare(self) -> PostgresServer:
        """Make and start one more cluster, on a port of its own, for :meth:`take_over`."""
        server = PostgresServer(self._settings)
        self._make(server)
        return server

    def lose(self) -> None:
        """Stop both servers at once, as a crash does."""
        for server in self.servers:
            server.stop("immediate")

    def take_over(self, successor: PostgresServer) -> PostgresServer:
        """Put another cluster in the place of the primary that was lost, at its port; return that primary.

        The old primary is left with the other one's port, and is to be removed. Commits are not synchronous
        until :meth:`replace` makes a standby.
        """
        old = self.primary
        if self.standby is not None:
            self._fallen, self.standby = self.standby, None
        successor.stop()
        successor.port, old.port = old.port, successor.port
        successor.start()
        self.primary = successor
        return old

    def detach(self) -> None:
        """Let the standby receive nothing more: what is committed from now on it lacks."""
        assert self.standby is not None, "there is no standby"
        self.standby.detach()
        until(lambda: not self._states(), seconds=CATCH_UP_SECONDS, what="the standby has left")

    def volume(self) -> Volume:
        """Return the file system of the primary."""
        return self._volumes[self.primary]

    def set_synchronous(self, names: str) -> None:
        """Set synchronous_standby_names, for which commits wait from now on; if empty, they do not wait."""
        with self.primary.connect() as connection:
            connection.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
            connection.execute("select pg_reload_conf()")

    def wait_until_replayed(self) -> None:
        """Wait until the standby shows everything that is committed now."""
        with self.primary.connect() as connection:
            row = connection.execute("select pg_current_wal_lsn()").fetchone()
            assert row is not None
            until(
                lambda: connection.execute(REPLAYED, (row[0], NAME)).fetchone() == (True,),
                seconds=CATCH_UP_SECONDS,
                what="the standby has caught up",
            )

    def wait_for_standby(self, state: str) -> None:
        """Wait until the standby is "streaming", or "sync": commits wait for it."""
        until(
            lambda: any(state in found for found in self._states()),
            seconds=CATCH_UP_SECONDS,
            what=f"the standby is {state}",
        )

    def _make(self, server: PostgresServer) -> None:
        if self._volume_megabytes is not None:
            self._volumes[server] = Volume(server.directory, self._volume_megabytes)
        self._made.append(server)
        server.__enter__()

    def remove(self, server: PostgresServer) -> None:
        """End a server that is not in use any more, and remove its files."""
        self._made.remove(server)
        volume = self._volumes.pop(server, None)
        server.close()
        if volume is not None:
            volume.remove()

    def _states(self) -> list[tuple[str, str]]:
        with self.primary.connect() as connection:
            return connection.execute(STATES, (NAME,)).fetchall()

    def _close(self) -> None:
        for server in list(self._made):
            self.remove(server)
