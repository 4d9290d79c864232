"""The wheel in environments that have nothing else: an application's, which emits, and a relay's."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox_relay import __version__
from tests.support.database import Database

ROOT = Path(__file__).parents[2]
SECONDS = 300
OLDEST_PSYCOPG = "psycopg==3.2"

# An environment is filled from the network, once for several tests.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400), pytest.mark.xdist_group("wheel")]

EMIT = """
import asyncio, sys
import psycopg
from outbox_relay import outbox


for name in ("pydantic", "aiohttp", "h11", "confluent_kafka", "structlog", "opentelemetry", "outbox_relay.settings"):
    assert name not in sys.modules, name

async def emit():
    async with await psycopg.AsyncConnection.connect(sys.argv[1]) as connection:
        return await outbox.aemit(connection, "order.paid", {"id": 1}, key="order-1")

with psycopg.connect(sys.argv[1]) as connection:
    print(outbox.emit(connection, "order.created", {"id": 1}, key="order-1"))
    for uid in outbox.emit_many(connection, [outbox.Event("order.packed", {"id": 1}, key="order-1")]):
        print(uid)
print(asyncio.run(emit()))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a test's own, without pip, and a folder outside of the source tree to work in."""

    folder: Path

    @classmethod
    def empty(cls, folder: Path) -> "Environment":
        """Return a new environment."""
        venv.create(folder / "venv", symlinks=True)
        return cls(folder)

    def pip(self, *arguments: str | Path) -> str:
        """Let this project's pip work on it; what it printed."""
        return succeed(sys.executable, "-m", "pip", "--python", self.folder / "venv/bin/python", *arguments)

    def run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run one of its programs, outside of the source tree and with nothing of the caller's Python."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run(
            [self.folder / "venv/bin" / program, *arguments],
            capture_output=True,
            check=False,
            cwd=self.folder,
            env=kept,
            text=True,
            timeout=SECONDS,
        )

    def distributions(self) -> set[str]:
        """Return the installed files."""
        return {entry["name"] for entry in json.loads(self.pip("list", "--format=json"))}


def succeed(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that has to succeed; what it printed."""
    done = subprocess.run(command, capture_output=True, check=False, cwd=cwd, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel made from the source archive, and that from the files of git: nothing else is needed."""
    tree = tmp_path_factory.mktemp("tree")
    listed = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", cwd=tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an application's environment, with the oldest psycopg that is promised."""
    environment = Environment.empty(tmp_path_factory.mktemp("bare"))
    environment.pip("install", "--quiet", wheel, OLDEST_PSYCOPG)
    return environment


@pytest.fixture(scope="session")
def relay(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return a relay's environment, with the versions of the lock."""
    folder = tmp_path_factory.mktemp("relay")
    lines = (ROOT / "requirements-relay.lock").read_text(encoding="utf-8").splitlines()
    pins = folder / "pins.txt"
    pins.write_text("\n".join(line.removesuffix(" \\") for line in lines if "==" in line.partition(" ")[0]))
    environment = Environment.empty(folder)
    environment.pip("install", "--quiet", "--no-compile", "--constraint", pins, f"{wheel}[relay]")
    return environment


def test_it_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "outbox_relay").rglob("*") if path.is_file()}
    wanted = {
        *(name for name in package if "__pycache__" not in name),
        *(f"outbox_relay/schema/{path.name}" for path in (ROOT / "schema").iterdir()),
    }
    data = ("py.typed", "schema/0001_outbox.sql", "postgres/sql/settle.sql", "settings/librdkafka.toml")
    assert {f"outbox_relay/{name}" for name in data} <= wanted
    info = f"outbox_relay-{__version__}.dist-info"
    assert {name for name in held if not name.startswith(f"{info}/")} == wanted
    assert f"{info}/licenses/LICENSE" in held


def test_an_application_gets_psycopg_alone(bare: Environment) -> None:
    assert bare.distributions() == {"outbox-relay", "psycopg", "typing_extensions"}


def test_an_application_emits(bare: Environment, database: Database) -> None:
    if find_library("pq") is None:
        # psycopg takes libpq from the system; where that has none, its extra `binary` brings one.
        bare.pip("install", "--quiet", OLDEST_PSYCOPG.replace("psycopg", "psycopg[binary]"))
    done = bare.run("python", "-W", "error", "-c", EMIT, database.dsn)
    assert done.returncode == 0, done.stderr
    with database.connect() as connection:
        rows = connection.execute("select uid::text, type, key from outbox.event order by id").fetchall()
    types = ["order.created", "order.packed", "order.paid"]
    assert rows == [(uid, of, "order-1") for uid, of in zip(done.stdout.split(), types, strict=True)]


def test_an_application_without_the_extra_is_told_so(bare: Environment) -> None:
    assert bare.run("outbox-relay", "--version").stdout == f"outbox-relay {__version__}\n"
    done = bare.run("outbox-relay", "run", "-c", ROOT / "config/relay.example.toml")
    assert done.returncode == 2
    assert "pip install 'outbox-relay[relay]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_relay_migrates(relay: Environment, empty_database: Database) -> None:
    done = relay.run("outbox-relay", "migrate", "--dsn", empty_database.dsn)
    assert done.returncode == 0, done.stderr
    assert "was created" in done.stdout
    assert "nothing to do" in relay.run("outbox-relay", "migrate", "--dsn", empty_database.dsn).stdout
