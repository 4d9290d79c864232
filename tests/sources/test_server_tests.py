"""The tests that `make servers` runs on each PostgreSQL: every file that needs a server is there, or says why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import nodes

pytestmark = pytest.mark.xdist_group("sources")  # parse each module once

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SERVERS = {"postgres", "own_postgres"}
"""The fixtures that start PostgreSQL."""
OTHER_FOLDERS = {
    "browser": "what the page shows; its queries are in test_ui_pages and test_ui_plans",
    "docs": "the blocks of the documents, whose functions have tests of their own",
    "packaging": "images and wheels",
    "webhook": "the client of webhooks",
}
OTHER_FILES = {
    "Kafka's, and so left out by `make servers`": """
        bench demo dev drill kafka_holding kafka_listeners kafka_registry kafka_relay
        kafka_rolling kafka_slow kafka_tokens main_job registry_trouble
    """,
    "thorough, and so run on one version only": "blackhole chaos_days clock prometheus",
    "of several versions by itself": "pg_upgrade",
    "commands and the page: what they say, of functions that other files test": """
        attempt_commands check_online cli connection_reasons dead_commands reasons
        ui_actions ui_answers ui_api ui_mounted ui_server why_key
    """,
    "processes: their files, signals, clients, memory and destinations": """
        blocking_files both_sinks chaos_replays client_trouble confinement demo_processes destination_down
        doctor_troubles handlers_example health_flood kafka_security memory_limit metrics
        nats_example notices_service plugins python_sink queue_service reload reload_clients reload_service
        service stopping stopping_service trace_export traces webhook_service
    """,
    "drivers and frameworks of applications": """
        connection contrib_asyncpg contrib_django contrib_sqlalchemy emit_traces inbox_docs inbox_sqlalchemy
        other_drivers testing
    """,
    "not tried on other versions yet, though they may depend on the server": """
        archive archive_leftovers attempts_dropped doctor_signals erase_idle fencing notice_types notices
        notices_lag notices_retention replay_share retention_relay sharing
    """,
}
"""The reason → files of tests/integration that are not in the list."""
SUPPORT = {"tests/support/test_groups.py", "tests/support/test_relay_harness.py", "tests/support/test_service.py"}
"""Tests of the tests' own parts."""


def parameters(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield the tests and fixtures of a module with the names of their parameters."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if node.name.startswith("test_") or "fixture" in decorators:
                yield node.name, {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


@cache
def fixtures() -> set[str]:
    """Return the shared fixtures that start PostgreSQL, directly or through others."""
    shared = [*TESTS.rglob("conftest.py"), *(TESTS / "support").glob("*.py")]
    functions = [function for path in shared for function in parameters(path)]
    found, before = set(SERVERS), set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, wanted in functions if wanted & found and not name.startswith("test_")}
    return found - {"template"}  # a parameter of other tests, too


def marked() -> set[str]:
    """Return the paths of the test files of which tests get the mark `postgres`, by a fixture or in their text."""
    by_fixture = {
        str(path.relative_to(ROOT))
        for path in TESTS.rglob("test_*.py")
        if any(wanted & fixtures() for _, wanted in parameters(path))
    }
    return by_fixture | having(r"mark\.postgres\b")


def having(pattern: str) -> set[str]:
    """Return the paths of the test files whose text matches."""
    paths = TESTS.rglob("test_*.py")
    return {str(p.relative_to(ROOT)) for p in paths if re.search(pattern, p.read_text(encoding="utf-8"))}


def needing_a_server() -> set[str]:
    """Return the paths of the test files with a fixture of PostgreSQL, or a server of their own."""
    return marked() | having(r"\bPostgresServer\(")


def listed() -> set[str]:
    """Return the paths of the files that `make servers` runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.search(
        r"^SERVER_TESTS := (.*?)\$\(addprefix (\S+?),\$\(addsuffix \.py,(.*?)\)\)$", makefile, re.MULTILINE
    )
    assert found is not None
    paths = found[1].split()
    folders = {str(p.relative_to(ROOT)) for path in paths for p in (ROOT / path).rglob("test_*.py")}
    files = {path for path in paths if path.endswith(".py")}
    return folders | files | {f"{found[2]}{name}.py" for name in found[3].split()}


def left_out() -> list[str]:
    """Return the paths of the files of tests/integration that have a reason not to be listed."""
    return [f"tests/integration/test_{name}.py" for names in OTHER_FILES.values() for name in names.split()]


def test_each_file_with_a_server_is_run_on_every_version_or_says_why_not() -> None:
    elsewhere = {path for path in needing_a_server() if path.split("/")[1] in OTHER_FOLDERS} | SUPPORT
    assert needing_a_server() - elsewhere - {*left_out()} - listed() == set()


def test_no_reason_is_out_of_date() -> None:
    assert sorted(left_out()) == sorted({*left_out()} & needing_a_server() - listed())
    assert needing_a_server() - listed() >= SUPPORT
    assert {path.split("/")[1] for path in needing_a_server()} >= OTHER_FOLDERS.keys()


def test_listed_files_exist_and_have_the_mark_by_which_they_are_selected() -> None:
    """Goes red without the mark of a file that starts its own servers: `make servers` would run nothing of it."""
    assert [path for path in sorted(listed()) if not (ROOT / path).is_file()] == []
    assert sorted(path for path in listed() - marked() if path.startswith("tests/integration/")) == []
