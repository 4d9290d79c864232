"""docs/django.md: its settings, commands and tests work as they stand there, in a project of Django's own making."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_relay.postgres.schema import SCHEMA_VERSION
from tests.docs.pages import blocks, commands
from tests.support.database import Database, query

PAGE = "docs/django.md"
MODELS = """
from django.db import models


class Order(models.Model):
    total = models.IntegerField()
"""
DATABASES = """
INSTALLED_APPS += ["orders"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.postgresql", **{place!r}}}}}
"""
SECONDS = 60


def run(folder: Path, *words: str, code: int = 0) -> str:
    """Run a program of the project, and return its output."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def project(folder: Path, database: Database) -> None:
    """Make a project with an application of its own on a database, as the page requires it."""
    run(folder, "-m", "django", "startproject", "shop", ".")
    run(folder, "manage.py", "startapp", "orders")
    settings, tests, suite = [block.text for block in blocks(PAGE) if block.language == "python"]
    found: dict[str, Any] = conninfo_to_dict(database.dsn)
    place = {name.upper(): found[name] for name in ("host", "port", "user")} | {"NAME": found["dbname"]}
    with (folder / "shop" / "settings.py").open("a") as file:
        file.write(DATABASES.format(place=place) + settings)
    (folder / "orders" / "models.py").write_text(MODELS)
    (folder / "orders" / "tests.py").write_text(tests)
    (folder / "orders" / "test_with_pytest.py").write_text(suite)
    run(folder, "manage.py", "makemigrations", "orders")


@pytest.mark.slow  # a project of Django with its migrations, tests and commands
def test_the_page_is_true(empty_database: Database, tmp_path: Path) -> None:
    project(tmp_path, empty_database)
    with empty_database.connect() as owner:
        roles = [f"{kind}_{empty_database.name}" for kind in ("app", "relay")]
        for role in roles:
            owner.execute(f"create role {role}".encode())
    try:
        lines = [line for block in blocks(PAGE) if block.language == "console" for line in commands(block)]
        for line in lines:
            named = line.replace("--grant-emit app", f"--grant-emit {roles[0]}")
            program, *words = shlex.split(named.replace("--grant-relay relay", f"--grant-relay {roles[1]}"))
            assert program == "python"
            shown = run(tmp_path, *words)
            if words == ["manage.py", "migrate"]:
                assert query(empty_database, "select schema_version from outbox.meta") == [(SCHEMA_VERSION,)]
            assert words != ["manage.py", "test"] or "Ran 1 test" in shown
            assert words[:2] != ["-m", "pytest"] or "2 passed" in shown
        assert query(empty_database, "select to_regnamespace('outbox') is null") == [(True,)]
        assert "outbox_relay.W005" in run(tmp_path, "manage.py", "check", "--database", "default")
        run(tmp_path, "manage.py", "outbox", "status", code=2)
    finally:
        with empty_database.connect() as owner:
            for role in roles:
                owner.execute(f"drop owned by {role}; drop role {role}".encode())
