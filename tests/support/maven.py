"""Artefacts that Maven fetches for the tests: into the checkout's cache, once, whole or not at all."""

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"
FETCH_SECONDS = 300
PLACE = "fetched"
"""The directory that Maven fills, inside a temporary one."""


class NotFetched(Exception):
    """Maven could not fetch what was asked for; the message says why and how to mend it."""


def directory_for(pom: Path, name: str) -> Path:
    """Return where the files of `pom` are kept. A new pom means new files: its digest is part of the name."""
    return CACHE / f"{name}-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"


def fetched(pom: Path, name: str, goal: str) -> Path:
    """Return the directory of the files of `pom`, fetched now if they are not there. Raise :class:`NotFetched`.

    Run `goal` of Maven's dependency plugin, which gets the directory to fill as the property `outputDirectory`. A
    process that comes while another one fetches waits for it.
    """
    directory = directory_for(pom, name)
    if directory.is_dir():
        return directory
    if shutil.which("mvn") is None:
        raise NotFetched("mvn is missing: install Maven 3, or run once where it is and keep .cache")
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            _fetch(pom, directory, goal)
    return directory


def _fetch(pom: Path, directory: Path, goal: str) -> None:
    """Fill the directory in one step, so that a broken fetch leaves nothing that looks whole."""
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        files = Path(place, PLACE)
        command = ["mvn", "-q", "-B", "-f", str(pom), f"dependency:{goal}", f"-DoutputDirectory={files}"]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=FETCH_SECONDS
            )
        except subprocess.TimeoutExpired as slow:
            raise NotFetched(f"Maven did not fetch {directory.name} within {FETCH_SECONDS} s") from slow
        if done.returncode != 0:
            raise NotFetched(f"Maven could not fetch {directory.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        files.rename(directory)
