"""The directory of a development environment, and who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.workbench.embedded.account import Account

LOCK = "outbox-relay-dev.lock"
SYSTEM_CACHE = Path("/var/cache")
"""The cache of root, whose own one the account of PostgreSQL cannot enter."""


def default_directory() -> Path:
    """Return ``outbox-relay/dev`` in the cache of the user: ``$XDG_CACHE_HOME``, ``~/.cache`` or ``/var/cache``."""
    if os.geteuid() == 0:
        cache = SYSTEM_CACHE
    else:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        cache = named if named.is_absolute() else Path.home() / ".cache"
    return cache / "outbox-relay" / "dev"


@contextlib.contextmanager
def locked(directory: Path, account: Account) -> Generator[None]:
    """Create the directory if it is missing, and keep other environments out of it.

    Raise :class:`ConfigurationError` if it cannot be used: another environment uses it, it has other files, or
    `account`, which runs PostgreSQL, cannot enter it.
    """
    with contextlib.ExitStack() as stack:
        try:
            _create(directory, account)
            lock = stack.enter_context((directory / LOCK).open("a+", encoding="ascii"))
        except OSError as error:
            raise ConfigurationError(f"the directory {directory} cannot be used: {error.strerror}. {OTHER}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigurationError(
                f"another outbox-relay dev, process {lock.read().strip() or '?'}, uses the directory {directory}: use "
                f"its servers, stop it, or name another directory with --directory, and other ports"
            ) from None
        if not account.can_run("/usr/bin/test", "-x", directory):
            raise ConfigurationError(
                f"the account that runs PostgreSQL, which refuses to run as root, cannot enter {directory}. {OTHER}"
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


OTHER = "Name another directory with --directory"


def _create(directory: Path, account: Account) -> None:
    """Create the directory. Raise :class:`ConfigurationError` if it exists with files of other programs."""
    directory.mkdir(mode=0o700 if account.user is None else 0o755, parents=True, exist_ok=True)
    if not (directory / LOCK).exists() and any(directory.iterdir()):
        raise ConfigurationError(f"the directory {directory} has files that are not of outbox-relay dev. {OTHER}")


def subdirectory(directory: Path, name: str, account: Account) -> Path:
    """Create a directory of `account` in another one if it is missing, and return it."""
    inside = directory / name
    inside.mkdir(mode=0o700, exist_ok=True)
    account.chown(inside)
    return inside
