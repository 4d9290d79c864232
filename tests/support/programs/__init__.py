"""The places of PostgreSQL's programs of each version: 18 in a wheel, 15 of Debian, 16 and 17 fetched by Maven."""

import atexit
import fcntl
import io
import platform
import shutil
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from outbox_relay.workbench.embedded import postgres
from outbox_relay.workbench.embedded.account import Account, unprivileged
from tests.support import maven

WHEEL_MAJOR = 18
FETCHED_MAJORS = (16, 17)
"""The servers alone: of their programs there are `postgres`, `initdb` and `pg_ctl`."""
CLIENTS = frozenset({"pg_basebackup", "pg_dump", "pg_dumpall", "pg_isready", "pgbench", "psql"})
"""Programs that work with servers older than themselves: where a version lacks one, the wheel's is taken."""
POM = Path(__file__).with_name("pom.xml")
ARCHIVE = "postgres-linux-x86_64.txz"
MACHINE = "x86_64"
ONLY_FOR_COMPILING = ".a"


class NoProgram(RuntimeError):
    """A program of PostgreSQL cannot be had in this version; the message says where it can."""


def program(directory: Path, name: str) -> Path:
    """Return the path of a program of the version whose programs are in `directory`; raise :class:`NoProgram`."""
    found = directory / name
    if found.exists():
        return found
    if name in CLIENTS:
        return programs(WHEEL_MAJOR) / name
    raise NoProgram(f"{directory} has no {name}: PostgreSQL 15 (of Debian) and {WHEEL_MAJOR} (of the wheel) have it")


@cache
def programs(major: int) -> Path:
    """Return the directory of PostgreSQL's programs, where the user that servers run as reaches them.

    What had to be copied for that user goes when the tests end. Raise RuntimeError when there is no such version here.
    """
    if major == WHEEL_MAJOR:
        account = unprivileged()
        return postgres.wheel_programs(account, _passing(account))
    if major in FETCHED_MAJORS:
        return _reachable(_unpacked(major))
    debian = Path(f"/usr/lib/postgresql/{major}/bin")
    if not (debian / "postgres").exists():
        raise RuntimeError(f"no PostgreSQL {major}: {debian} is missing; apt-get install postgresql-{major}")
    return debian


def fetch() -> Path:
    """Return the directory of the archives of :data:`FETCHED_MAJORS`, fetched now if they are not there."""
    if platform.machine() != MACHINE:
        raise RuntimeError(f"PostgreSQL {FETCHED_MAJORS} is fetched for {MACHINE} only, this is {platform.machine()}")
    try:
        return maven.fetched(POM, "postgres", "copy")
    except maven.NotFetched as reason:
        raise RuntimeError(str(reason)) from reason


def _unpacked(major: int) -> Path:
    """Return the directory of one version, unpacked in one step next to its archive."""
    archives = fetch()
    place = archives / str(major)
    with (archives / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            [jar] = archives.glob(f"*-{major}.*.jar")
            with tempfile.TemporaryDirectory(dir=archives) as making:
                Path(making).chmod(0o755)
                _unpack(jar, Path(making, "all"))
                Path(making, "all").rename(place)
    return place


def _unpack(jar: Path, place: Path) -> None:
    with zipfile.ZipFile(jar) as outer, tarfile.open(fileobj=io.BytesIO(outer.read(ARCHIVE))) as inner:
        wanted = [member for member in inner if not member.name.endswith(ONLY_FOR_COMPILING)]
        inner.extractall(place, wanted, filter="tar")


def _reachable(place: Path) -> Path:
    account = unprivileged()
    if account.can_run(place / "bin" / "postgres", "--version"):
        return place / "bin"
    copy = _passing(account) / "programs"
    shutil.copytree(place, copy, symlinks=True)
    account.chown(copy)
    return copy / "bin"


def _passing(account: Account) -> Path:
    """Return a directory that is removed when the tests end."""
    place = account.new_directory("outbox-programs-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place
