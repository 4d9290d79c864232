"""Modules that applications import, beside nothing but what their pages tell to install."""

import pkgutil
import subprocess
import sys

import pytest

from outbox_relay import contrib

pytestmark = pytest.mark.processes

# A program whose arguments are names of distributions and the code to run. Only these, what they require without
# extras, the standard library and this package can be imported.
ALONE = """
import importlib.metadata, re, sys

def required(name, found):
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return
    found.add(name)
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required(requirement.name, found)

from packaging.requirements import Requirement
allowed = set()
for name in sys.argv[1:-1]:
    required(name, allowed)
packages = importlib.metadata.packages_distributions()
named = {re.sub(r"[-_.]+", "-", each).lower(): each for found in packages.values() for each in found}
importable = {top for top, owners in packages.items() if {named.get(name) for name in allowed} & set(owners)}

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in importable | sys.stdlib_module_names | {"outbox_relay"} and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

for name in [name for name in sys.modules if name.partition(".")[0] == "packaging"]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
exec(sys.argv[-1])
"""
# By module: the distributions, and what is done with it. `psycopg` stands where a page needs `pip install outbox-relay`
# with a libpq, which a machine may lack.
INSTALLED = {
    "outbox": ["psycopg"],
    "inbox": ["psycopg"],
    "catalogue": [],
    "testing": ["pytest"],
    "contrib.sqlalchemy": ["sqlalchemy"],
    "contrib.asyncpg": ["asyncpg"],
    "contrib.alembic": ["alembic"],
    "contrib.installing": [],
    "contrib.django": ["django", "psycopg"],
}
DJANGO = """
import django
from django.conf import settings
names = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "outbox_relay.contrib.django"]
settings.configure(INSTALLED_APPS=names)
django.setup()
import outbox_relay.contrib.django.checks
from importlib import import_module
import_module("outbox_relay.contrib.django.migrations.0001_initial")
"""


def run_alone(code: str, *distributions: str) -> str:
    """Run code where only these distributions are installed; what it printed."""
    command = [sys.executable, "-c", ALONE, *distributions, code]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("module", "distributions"), INSTALLED.items())
def test_a_module_needs_what_its_page_says(module: str, distributions: list[str]) -> None:
    run_alone(f"import outbox_relay.{module}", *distributions)


def test_every_module_of_contrib_is_imported_here() -> None:
    names = {f"contrib.{module.name}" for module in pkgutil.iter_modules(contrib.__path__)}
    assert names == {name for name in INSTALLED if name.startswith("contrib.")}


def test_django_starts_without_the_extra() -> None:
    run_alone(DJANGO, "django", "psycopg")


def test_what_handlers_import_needs_nothing() -> None:
    run_alone("from outbox_relay import Dead, Delivery, Retry")


def test_asynchronous_functions_without_greenlet_say_what_to_install() -> None:
    code = """
import asyncio
from outbox_relay.contrib import sqlalchemy as outbox
try:
    asyncio.run(outbox.aemit(None, "order.created", {}))
except ImportError as error:
    print(error)
"""
    assert "sqlalchemy[asyncio]" in run_alone(code, "sqlalchemy")


@pytest.mark.parametrize("module", ["greenlet", "pydantic", "pytest"])
def test_what_is_not_named_cannot_be_imported(module: str) -> None:
    with pytest.raises(AssertionError, match="No module named"):
        run_alone(f"import {module}", "sqlalchemy")
