"""docs/testing.md: its tests pass as they stand there, and a failure is shown as the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.support.child_processes import reachable
from tests.support.database import Database

PAGE = "docs/testing.md"
SUITE_SECONDS = 120
SHOP = """
from outbox_relay import outbox

def place_order(conn, order_id, total=1250):
    if total:
        outbox.emit(conn, "order.created", {"id": order_id, "total": total}, key=f"order-{order_id}")

def send_invoice(event):
    assert event.payload["total"] == 1250
"""
CONFTEST = """
import psycopg, pytest

@pytest.fixture
def conn():
    with psycopg.connect({dsn!r}) as found:
        found.execute("select 1")
        yield found
        found.rollback()
"""
FAILS = """
from shop import place_order

def test_fails(conn, outbox_events):
    place_order(conn, 1)
    outbox_events(conn).assert_emitted("order.created", payload={"total": 900})
"""


def suite(database: Database, place: Path, *tests: str) -> str:
    """Run tests as an application's suite has them, and return what pytest prints."""
    return run_suite(place, CONFTEST.format(dsn=database.dsn), *tests)


def run_suite(place: Path, conftest: str, *tests: str) -> str:
    (place / "shop.py").write_text(SHOP)
    (place / "conftest.py").write_text(conftest)
    for number, text in enumerate(tests):
        (place / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(place), str(place)]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**own, "PATH": programs}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=SUITE_SECONDS
    )
    return done.stdout + done.stderr


def python() -> tuple[list[str], str]:
    """Return the modules of tests of the page, and its `conftest.py`."""
    found = [block.text for block in blocks(PAGE) if block.language == "python"]
    [conftest] = [text for text in found if "def conn(" in text]
    return [text for text in found if text != conftest], conftest


@pytest.mark.slow  # runs what a page shows
def test_the_page_is_true(database: Database, tmp_path: Path) -> None:
    tests, _ = python()
    assert f"{sum(text.count('def test_') for text in tests)} passed" in suite(database, tmp_path, *tests)


@pytest.mark.postgres
@pytest.mark.slow  # it makes a cluster
def test_the_suite_can_have_the_database_of_dev() -> None:
    tests, conftest = python()
    with reachable() as place:
        assert f"{sum(text.count('def test_') for text in tests)} passed" in run_suite(place, conftest, *tests)
        assert (place / ".outbox-relay").is_dir()


@pytest.mark.slow  # runs what a page shows
def test_a_failure_is_shown_as_on_the_page(database: Database, tmp_path: Path) -> None:
    [shown] = [block.text for block in blocks(PAGE) if block.language == "text"]
    printed = [line.removeprefix("E").strip() for line in suite(database, tmp_path, FAILS).splitlines()]
    assert [line.strip() for line in shown.splitlines()] == printed[printed.index(shown.splitlines()[0]) :][:3]
