"""The operating system account that servers run as. PostgreSQL refuses to run as root."""

import os
import pwd
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CANDIDATES = ("postgres", "nobody")
"""Tried in this order if the current user is root; the second exists on every Linux system."""
CHECK_SECONDS = 10
"""Timeout of the command that checks what a user may run."""


@dataclass(frozen=True)
class Account:
    """User and groups for subprocesses; None keeps the current ones."""

    user: int | None = None
    group: int | None = None
    extra_groups: tuple[int, ...] | None = None

    def can_run(self, *command: str | Path) -> bool:
        """Run the command and return True if this user can execute it successfully."""
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
        """Make this user the owner of a file, or of a directory and its contents."""
        if self.user is None or self.group is None:
            return
        os.chown(path, self.user, self.group)
        for inside in path.rglob("*") if path.is_dir() else ():
            os.chown(inside, self.user, self.group, follow_symlinks=False)

    def new_directory(self, prefix: str, parent: Path | None = None) -> Path:
        """Create a temporary directory owned by this user, in ``parent`` or where this user can reach it."""
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent or self._reachable()))
        self.chown(directory)
        return directory

    def _reachable(self) -> str | None:
        """Return a directory for temporary files that this user may enter; None means the default."""
        if self.user is None:
            return None
        return next((d for d in (tempfile.gettempdir(), "/tmp") if self.can_run("/usr/bin/test", "-x", d)), None)  # noqa: S108


CURRENT = Account()


def unprivileged() -> Account:
    """Return the current user, or another one if that is root. Raise RuntimeError if there is no other."""
    if os.geteuid() != 0:
        return CURRENT
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in CANDIDATES:
        if entry := known.get(name):
            return Account(entry.pw_uid, entry.pw_gid, ())
    raise RuntimeError(f"PostgreSQL refuses to run as root: add a user with one of the names {CANDIDATES}")
