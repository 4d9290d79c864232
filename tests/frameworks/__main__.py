"""Run the tests of frameworks in new virtual environments, one with the oldest versions and one with the newest.

usage: python -m tests.frameworks [lowest] [newest]

The oldest versions are those of `lowest.txt`, the newest are what the package index has. Everything else is as
`requirements.lock` says. Takes some minutes for each, most of them for the installation.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOWEST = Path(__file__).with_name("lowest.txt")
INSTALL_SECONDS, TEST_SECONDS = 1800, 1200
TESTS = (
    "tests/docs/test_alembic_page.py",
    "tests/docs/test_fastapi_page.py",
    "tests/integration/test_contrib_asyncpg.py",
    "tests/integration/test_contrib_django.py",
    "tests/integration/test_contrib_sqlalchemy.py",
    "tests/integration/test_django_app.py",
    "tests/integration/test_emit_docs.py",
    "tests/integration/test_inbox_docs.py",
    "tests/integration/test_inbox_sqlalchemy.py",
    "tests/integration/test_testing.py",
)
TOOLS = (
    *("flask", "httpx", "hypothesis", "jsonschema", "msgspec", "pg8000", "psycopg2-binary"),
    *("pytest", "pytest-asyncio", "pytest-django", "pytest-timeout", "pytest-xdist", "trustme"),
)
FOLLOWERS = {"django-stubs", "django-stubs-ext", "asyncpg-stubs", "greenlet", "typing-extensions"}
"""Packages whose locked versions are for the locked versions of frameworks."""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)")


def pins(path: Path) -> dict[str, str]:
    """Return the versions that a requirements file fixes, by the name of the package in lower case."""
    found = (_PIN.match(line) for line in path.read_text().splitlines())
    return {match[1].lower(): match[2] for match in found if match}


def constraints(lowest: bool) -> dict[str, str]:
    """Return the versions to install by package: those of the lock file, but for frameworks."""
    frameworks = pins(LOWEST)
    locked = pins(ROOT / "requirements.lock")
    others = {name: version for name, version in locked.items() if name not in frameworks.keys() | FOLLOWERS}
    return others | (frameworks if lowest else {})


def run(words: Iterable[str | Path], seconds: float) -> int:
    """Run a command in the project's root and return its exit code."""
    return subprocess.run([str(word) for word in words], cwd=ROOT, timeout=seconds, check=False).returncode


def check(kind: str, folder: Path) -> int:
    """Install the versions of this kind into a new environment, run the tests there, and return the exit code."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    limits = folder / "constraints.txt"
    limits.write_text("".join(f"{name}=={version}\n" for name, version in constraints(kind == "lowest").items()))
    frameworks = [name if name != "sqlalchemy" else "sqlalchemy[asyncio]" for name in pins(LOWEST)]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", limits]
    code = run([*install, "--editable", ".[catalogue,demo,relay,ui]", *frameworks, *TOOLS], INSTALL_SECONDS)
    if code:
        return code
    say(f"{kind}: " + ", ".join(f"{name} {version}" for name, version in installed(python).items()))
    test = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m", "slow or not slow", *TESTS]
    return run(test, TEST_SECONDS)


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the frameworks in the environment of this Python."""
    listed = subprocess.run(
        [python, "-m", "pip", "freeze", "--exclude-editable"], capture_output=True, text=True, timeout=60, check=True
    )
    found = dict(line.lower().split("==") for line in listed.stdout.splitlines() if "==" in line)
    return {name: found[name] for name in pins(LOWEST)}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Check the kinds of environments that are named, or both; return the first exit code that is not 0."""
    kinds = argv or ["lowest", "newest"]
    if not {"lowest", "newest"}.issuperset(kinds):
        sys.stderr.write("usage: python -m tests.frameworks [lowest] [newest]\n")
        return 2
    codes: list[int] = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="frameworks-") as folder:
            codes.append(check(kind, Path(folder)))
        say(f"{kind}: {'passed' if not codes[-1] else f'failed with {codes[-1]}'}")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
