"""A file system of its own that a test can fill to the last byte: a tmpfs, whose size changes while it is in use."""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMMAND_SECONDS = 20
LEFT_BYTES = 64 * 1024
"""Free space of a full one: a tmpfs cannot be made smaller than its content."""
FILL_TRIES = 20
"""More may be written between looking and resizing than was to stay free; then it is looked again."""


class Volume:
    """At most `megabytes` below `path`, an empty directory, which keeps its owner. Only root can make one."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        self._megabytes = megabytes
        owner = path.stat()
        _run(
            "mount", "-t", "tmpfs", "-o", f"size={megabytes}m,uid={owner.st_uid},gid={owner.st_gid},mode=0700",
            "outbox-tests", str(path),
        )  # fmt: skip

    def fill(self) -> int:
        """Leave no room; returns the bytes in use. What exists already can still be written over."""
        used = 0
        for tries_left in reversed(range(FILL_TRIES)):
            used = _used(self.path)
            try:
                self._resize(f"{used + LEFT_BYTES}")
            except subprocess.CalledProcessError:
                if not tries_left:
                    raise
            else:
                break
        return used

    def free(self) -> None:
        """Give the room back."""
        self._resize(f"{self._megabytes}m")

    def remove(self) -> None:
        """Unmount it, with all that is in it."""
        _run("umount", "--lazy", str(self.path))
        self.path.rmdir()

    def _resize(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.path))


@cache
def available() -> bool:
    """May this process make volumes here?"""
    if os.geteuid() != 0:
        return False
    place = Path(tempfile.mkdtemp(prefix="outbox-volume-"))
    try:
        Volume(place, 1).remove()
    except (OSError, subprocess.SubprocessError):
        place.rmdir()
        return False
    return True


def _used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMMAND_SECONDS)
