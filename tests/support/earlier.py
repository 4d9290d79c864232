"""Packages of earlier versions, taken from the history of this repository: they run while a newer one rolls out."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from outbox_relay import __version__
from tests.support.command import SECONDS, Ended

ROOT = Path(__file__).parents[2]
LAST_OF = {
    1: "9e29e01152e287ea1d15b00344c487eb7b3fdd36",
    2: "a279329e970ce255453a04c1be4a38fa61f8422c",
    9: "12c2608dc5cb0c90c7edfbb440f9ed25439ced8d",
    10: "3e644f58228693274c9721fc70faca56d2f4ce4b",
    19: "6f706273073fbedcfbd7b2ec68b6002def81feb5",
    20: "6dbb60501b58a2ac53976bcd7964ba748462878d",
    26: "d3afcbafe3184e684cc9a0a698acc9ae7e1f2150",
    28: "544615dd726b7e50736d4f922f22ff4ad645eaea",
    29: "e7aa9eb6c777b27d5b24803c4597042479f5b877",
    30: "3be7ef13f9c60c67b6a8798b969d01389874627e",
    31: "03d2f0b030fc9d22d078db9a0ca9d34fc21c2427",
    32: "f35066a0d3f19832a59a05724e6c28a72253e7fd",
}
"""The last commit of each earlier version of the schema that was in use: the numbers between them came together.

The present version is added by the migration that follows it: until then there is nothing to migrate from it.
"""
VERSION_IN = {
    1: "outbox_relay.migrate",
    2: "outbox_relay.postgres.migrations",
    9: "outbox_relay.postgres.schema_versions",
    10: "outbox_relay.postgres.schema_versions",
    19: "outbox_relay.postgres.schema_versions",
    20: "outbox_relay.postgres.schema_versions",
    26: "outbox_relay.postgres.schema_versions",
    28: "outbox_relay.postgres.schema_versions",
    29: "outbox_relay.postgres.schema_versions",
    30: "outbox_relay.postgres.schema_versions",
    31: "outbox_relay.postgres.schema_versions",
    32: "outbox_relay.postgres.schema_versions",
}
"""The module of each that knows the version of its schema."""
PARTS = ("outbox_relay", "schema")
ARCHIVE_SECONDS = 60


class Earlier:
    """The package made for schema version `version`, unpacked into `place`; its relay and its commands.

    Raise RuntimeError where the history does not reach that far back: nothing is skipped.
    """

    def __init__(self, version: int, place: Path) -> None:
        self.version = version
        self._place = place
        with tarfile.open(fileobj=io.BytesIO(_archive(LAST_OF[version]))) as archive:
            archive.extractall(place, filter="data")
        package = place / "outbox_relay" / "__init__.py"
        text = package.read_text()
        package.write_text(text.replace(f'"{__version__}"', f'"{self.release}"'))
        assert package.read_text() != text

    @property
    def release(self) -> str:
        """Its version. That of every development version is the same, so another one is written into the package."""
        return f"0.0.{self.version}"

    @property
    def schema(self) -> Path:
        """Its migrations."""
        return self._place / "schema"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which `python -m outbox_relay` runs this package, not that of the current directory."""
        return {"PYTHONPATH": str(self._place), "PYTHONSAFEPATH": "1"}

    def run(self, *arguments: str) -> Ended:
        """Run one of its commands; raise AssertionError when that fails."""
        done = subprocess.run(
            [sys.executable, "-m", "outbox_relay", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=SECONDS,
            env={**os.environ, **self.environment},
        )
        assert done.returncode == 0, done.stderr.decode()
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    def is_what_runs(self) -> bool:
        """Return True if Python, in that environment, imports this package and no other."""
        module = VERSION_IN[self.version]
        command = [sys.executable, "-c", f"import {module} as m; print(m.__file__, m.SCHEMA_VERSION)"]
        done = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=SECONDS, env={**os.environ, **self.environment}
        )
        return done.stdout.split() == [f"{self._place / module.replace('.', '/')}.py", str(self.version)]


def _archive(commit: str) -> bytes:
    """Return an archive of the package and its schema at ``commit``."""
    done = subprocess.run(
        ["/usr/bin/env", "git", "-C", ROOT, "archive", "--format=tar", commit, *PARTS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=ARCHIVE_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"commit {commit} is not in this checkout, and the relay of an earlier version comes from it: fetch the "
            f"whole history with `git fetch --unshallow` (git says: {done.stderr.decode().strip()})"
        )
    return done.stdout
