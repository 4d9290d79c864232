"""The operating system's user that servers run as: PostgreSQL refuses to run as root, so root lends it another."""

import os
import pwd
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CANDIDATES = ("postgres", "nobody")
"""Used in this order when the current user is root; the second exists on every Linux."""
CHECK_SECONDS = 10
"""Longest time for one look at what a user may run."""


@dataclass(frozen=True)
class Account:
    """A user and group for subprocesses; None everywhere leaves them as they are."""

    user: int | None = None
    group: int | None = None
    extra_groups: tuple[int, ...] | None = None

    def can_run(self, *command: str | Path) -> bool:
        """May this user reach and execute the command? Runs it."""
        try:
            done = subprocess.run(  # noqa: S603 - programs of wheels, by their paths
                command,
                cwd="/",
                check=False,
                capture_output=True,
                timeout=CHECK_SECONDS,
                user=self.user,
                group=self.group,
                extra_groups=self.extra_groups,
            )
        except PermissionError:
            return False
        return done.returncode == 0

    def chown(self, path: Path) -> None:
        """Give a file, or a directory and all that is in it, to this user."""
        if self.user is None or self.group is None:
            return
        os.chown(path, self.user, self.group)
        for inside in path.rglob("*") if path.is_dir() else ():
            os.chown(inside, self.user, self.group, follow_symlinks=False)

    def new_directory(self, prefix: str, parent: Path | None = None) -> Path:
        """A new temporary directory that belongs to this user, in ``parent`` or where this user can reach it."""
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent or self._reachable()))
        self.chown(directory)
        return directory

    def _reachable(self) -> str | None:
        """A place for temporary directories that this user may enter; None is the usual one."""
        if self.user is None:
            return None
        return next((d for d in (tempfile.gettempdir(), "/tmp") if self.can_run("/usr/bin/test", "-x", d)), None)  # noqa: S108


CURRENT = Account()


def unprivileged() -> Account:
    """The current user, or one that is not root when the current one is; raises RuntimeError if there is none."""
    if os.geteuid() != 0:
        return CURRENT
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in CANDIDATES:
        if entry := known.get(name):
            return Account(entry.pw_uid, entry.pw_gid, ())
    raise RuntimeError(f"PostgreSQL refuses to run as root: add a user with one of the names {CANDIDATES}")
