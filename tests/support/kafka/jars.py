"""Jars of Apache Kafka and what runs beside it: fetched once by Maven into the checkout's cache."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

POM = Path(__file__).with_name("pom.xml")
CACHE = Path(__file__).parents[3] / ".cache"
FETCH_SECONDS = 300


class NoKafka(Exception):
    """Apache Kafka cannot be had on this machine; the message says why and how to mend it."""


def jars(pom: Path = POM) -> Path:
    """The directory of the jars that ``pom`` names, fetched now if they are not there. Raises :class:`NoKafka`."""
    missing = [name for name in ("java", "mvn") if shutil.which(name) is None]
    if "java" in missing:
        raise NoKafka("java is missing: install a Java runtime of version 17 or newer")
    # A new pom means new jars: its digest is part of the directory's name.
    directory = CACHE / f"{pom.parent.name}-libs-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if directory.is_dir():
        return directory
    if missing:
        raise NoKafka("mvn is missing: install Maven 3, or run once where it is and keep .cache")
    _fetch(pom, directory)
    return directory


def _fetch(pom: Path, directory: Path) -> None:
    """Fill the directory in one step, so that a broken fetch leaves nothing that looks whole."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={place}/libs"]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=FETCH_SECONDS
            )
        except subprocess.TimeoutExpired as slow:
            raise NoKafka(f"Maven did not fetch Kafka's jars within {FETCH_SECONDS} s") from slow
        if done.returncode != 0:
            raise NoKafka(f"Maven could not fetch Kafka's jars: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        Path(place, "libs").rename(directory)
