"""Run, load or parse every block of code on every page. A block that no test covers is an error."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic_settings import InitSettingsSource

from outbox_relay import settings
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, mentioned
from tests.docs.parsing import COMMON, options, parse, parsers
from tests.support.database import Database

CONFIGURATION = "tests/unit/test_settings_example.py"
# Page and language, and the page's own test that runs these blocks.
ELSEWHERE = {
    ("README.md", "sql"): "tests/docs/test_readme.py::test_the_quick_start_delivers_an_event",
    ("docs/alembic.md", "python"): "tests/docs/test_alembic_page.py::test_the_page_is_true",
    ("docs/asyncpg.md", "python"): "tests/docs/test_sqlalchemy_page.py::test_the_page_is_true",
    ("docs/configuration.md", "text"): f"{CONFIGURATION}::test_problems_of_the_page_are_what_is_said",
    ("docs/consumers.md", "python"): "tests/integration/test_inbox_docs.py::test_the_page_is_true",
    ("docs/consumers.md", "sql"): "tests/integration/test_inbox_docs.py::test_the_page_is_true",
    ("docs/debezium.md", "python"): "tests/debezium/test_page.py::test_the_page_is_true",
    ("docs/debezium.md", "sql"): "tests/debezium/test_page.py::test_the_page_is_true",
    ("docs/deploying.md", "ini"): "tests/packaging/test_deploying_docs.py::test_the_unit_runs_the_relay",
    ("docs/deploying.md", "yaml"): "tests/packaging/test_deploying_docs.py::test_the_manifests_agree_with_the_settings",
    ("docs/django.md", "python"): "tests/docs/test_django_page.py::test_the_page_is_true",
    ("docs/emitting.md", "python"): "tests/integration/test_emit_docs.py::test_the_page_is_true",
    ("docs/emitting.md", "sql"): "tests/integration/test_emit_docs.py::test_the_page_is_true",
    (
        "docs/fastapi.md",
        "python",
    ): "tests/docs/test_fastapi_page.py::test_the_blocks_of_the_page_are_parts_of_the_example",
    ("docs/getting-started.md", "python"): "tests/docs/test_getting_started.py::test_the_page_is_true",
    ("docs/getting-started.md", "sql"): "tests/docs/test_getting_started.py::test_the_page_is_true",
    ("docs/kafka.md", "python"): (
        "tests/unit/test_kafka_tokens.py::test_the_function_of_the_page_returns_a_token_of_aws"
    ),
    ("docs/observability.md", "python"): "tests/unit/test_application_logs.py::test_the_page_is_true",
    ("docs/observability.md", "text"): "tests/unit/test_application_logs.py::test_the_page_is_true",
    (
        "docs/observability.md",
        "yaml",
    ): "tests/docs/test_metrics.py::test_prometheus_accepts_the_configuration_of_the_page",
    ("docs/operations.md", "python"): "tests/integration/test_archive.py::test_the_page_reads_an_archive",
    ("docs/page.md", "python"): "tests/integration/test_ui_mounted.py::test_the_page_is_true",
    ("docs/queue.md", "sql"): (
        "tests/docs/test_queue_page.py::test_jobs_move_from_a_table_without_one_lost_or_done_twice"
    ),
    ("docs/plugins.md", "python"): "tests/docs/test_plugins_page.py::test_the_page_is_true",
    ("docs/sqlalchemy.md", "python"): "tests/docs/test_sqlalchemy_page.py::test_the_page_is_true",
    ("docs/testing.md", "python"): "tests/docs/test_testing_page.py::test_the_page_is_true",
    ("docs/testing.md", "text"): "tests/docs/test_testing_page.py::test_a_failure_is_shown_as_on_the_page",
    ("docs/tutorial.md", "python"): "tests/docs/test_tutorial.py::test_the_page_is_true",
    ("docs/webhooks.md", "http"): "tests/unit/test_webhook_docs.py::test_example_is_what_is_sent",
    ("docs/webhooks.md", "python"): "tests/unit/test_webhook_docs.py::test_receivers_verify_with_the_snippets",
    ("docs/webhooks.md", "text"): "tests/unit/test_webhook_docs.py::test_file_of_secrets_of_the_page_can_be_read",
}
# Page and program of a command line, and the page's own test that runs it.
RUN_ELSEWHERE = {
    ("README.md", "sql"): "tests/docs/test_readme.py::test_the_quick_start_delivers_an_event",
    ("docs/alembic.md", "alembic"): "tests/docs/test_alembic_page.py::test_the_page_is_true",
    ("docs/configuration.md", "="): f"{CONFIGURATION}::test_environment_of_the_page_makes_a_relay",
    ("docs/debezium.md", "curl"): "tests/debezium/test_page.py::test_the_page_is_true",
    ("docs/django.md", "python"): "tests/docs/test_django_page.py::test_the_page_is_true",
    ("docs/fastapi.md", "psql"): "tests/docs/test_fastapi_page.py::test_an_order_comes_back_as_an_invoice",
    ("docs/fastapi.md", "uvicorn"): "tests/docs/test_fastapi_page.py::test_an_order_comes_back_as_an_invoice",
    ("docs/observability.md", "="): "tests/unit/test_tracing.py::test_the_variables_of_the_page_are_followed",
    ("docs/observability.md", "sed"): (
        "tests/docs/test_alerts.py::test_a_place_is_put_before_the_runbook_as_the_page_says"
    ),
    **{
        ("docs/tutorial.md", program): "tests/docs/test_tutorial.py::test_the_page_is_true"
        for program in ("curl", "export", "pytest", "python", "uvicorn")
    },
    ("docs/deploying.md", "="): "tests/packaging/test_deploying_docs.py::test_the_variables_are_those_of_compose",
}
EXAMPLE = ROOT / "config" / "relay.example.toml"
"""The configuration that completes a block of settings."""
ORDERS = "create table orders (id bigint primary key, total numeric)"


def of(*languages: str) -> list[Block]:
    """Return the blocks in these languages that no page's own test runs."""
    return [b for b in blocks() if b.language in languages and (b.page, b.language) not in ELSEWHERE]


# -- by language ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "toml"], ids=str)
def test_toml_loads(block: Block, tmp_path: Path) -> None:
    given = tomllib.loads(block.text)
    sinks = given.get("sinks", {})
    if not all("type" in sink for sink in sinks.values()):
        layers = (given, tomllib.loads(EXAMPLE.read_text()))
        sources = tuple(InitSettingsSource(settings.Settings, values) for values in layers)
        assert settings.Settings.model_validate({"sources": sources})
        return
    path = tmp_path / "relay.toml"
    routes = "" if "routes" in given or not sinks else f'[routes]\n"*" = {json.dumps(list(sinks))}\n'
    path.write_text(block.text + routes)
    assert not [said for said in settings.warnings(settings.load(path, {})) if "there is no sink" not in said]


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "json"], ids=str)
def test_json_parses(block: Block) -> None:
    if block.text.startswith("{") and "\n{" in block.text:
        for line in block.text.splitlines():
            json.loads(line)
    else:
        json.loads(block.text)


@pytest.mark.parametrize("block", of("sql"), ids=str)
def test_sql_runs(block: Block, database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(ORDERS)
        conn.execute(block.text.encode())


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs(block: Block, database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute(ORDERS)
        exec(compile(block.text, str(block), "exec"), {"conn": conn, "dsn": database.dsn})  # noqa: S102 - of the page
        assert conn.execute("select count(*) > 0 from outbox.event").fetchone() == (True,)


# -- command lines ----------------------------------------------------------------------------------------------------

LINES = [(b, line) for b in blocks() if b.language in ("sh", "console", "text") for line in commands(b)]


@pytest.mark.parametrize(("block", "line"), LINES, ids=[f"{b} {line[:30]}" for b, line in LINES])
def test_command_lines_are_right(block: Block, line: str) -> None:
    program, *words = shlex.split(line)
    if re.match(r"[A-Z_]+=", program):
        program = "="
    if (block.page, program) in RUN_ELSEWHERE:
        return
    assert program in CHECKS, f"{block}: nothing checks {program!r}"
    CHECKS[program](words, line)


def _outbox_relay(words: list[str], _line: str) -> None:
    parse(words)


def _make(words: list[str], _line: str) -> None:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words


def _pip(words: list[str], _line: str) -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = given["project"]["optional-dependencies"]
    tested = [name for name in given["dependency-groups"]["dev"] if isinstance(name, str)]
    assert words[0] == "install"
    for word in words[1:]:
        name, _, extra = word.removesuffix("]").partition("[")
        if name in ("outbox-relay", "."):
            assert set(filter(None, extra.split(","))) <= set(extras), word
        else:
            assert any(re.match(rf"{name}[<>=]", known) for known in (*extras["demo"], *tested)), word


def _harmless(_words: list[str], line: str) -> None:
    assert subprocess.run(["/bin/sh", "-ec", line], capture_output=True, check=True, timeout=20).stdout


CHECKS: dict[str, Callable[[list[str], str], None]] = {
    "outbox-relay": _outbox_relay,
    "make": _make,
    "pip": _pip,
    "echo": _harmless,
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_prose_exist(page: str) -> None:
    for words in mentioned(page, "outbox-relay"):
        _exists([word for word in words if not word.startswith("[")], page)
    for words in mentioned(page, "make"):
        _make(words or ["help"], page)
    for words in mentioned(page, "pip"):
        _pip([word for word in words if word != "--no-deps"], page)


def _exists(words: list[str], page: str) -> None:
    """Assert that the command of the prose exists and has these options."""
    known = parsers()
    command, *rest = [word for word in words if not word.startswith("-")] or ["COMMAND"]
    groups = {name.split(" ")[0] for name in known if " " in name}
    if command == "COMMAND" or (command in groups and not rest):
        return
    command = f"{command} {rest[0]}" if command in groups else command
    assert command in known, f"{page}: outbox-relay {command}"
    for option in (word.split("=")[0] for word in words if word.startswith("-")):
        assert option in COMMON | options(command), f"{page}: outbox-relay {command} {option}"


# -- nothing is left over ---------------------------------------------------------------------------------------------


def test_every_block_is_covered() -> None:
    run_here = {"toml", "json", "sh", "console", "sql", "python"}
    for block in blocks():
        covered = block.language in run_here or (block.page, block.language) in ELSEWHERE
        covered = covered or (block.language == "text" and bool(commands(block)))
        covered = covered or (not block.language and set("┌│└") <= set(block.text))  # a drawing
        assert covered, f"{block}: nothing runs, loads or parses this block of {block.language or 'no language'}"
        assert block.language != "console" or commands(block), f"{block}: no command in it"


@pytest.mark.parametrize("test", sorted({*ELSEWHERE.values(), *RUN_ELSEWHERE.values()}))
def test_the_tests_of_the_pages_exist(test: str) -> None:
    path, name = test.split("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("where", sorted({*ELSEWHERE, *RUN_ELSEWHERE}), ids=" ".join)
def test_the_tables_name_what_is_there(where: tuple[str, str]) -> None:
    page, kind = where
    if where in ELSEWHERE:
        assert [b for b in blocks(page) if b.language == kind]
    else:
        assert [line for b in blocks(page) for line in commands(b) if line.startswith(kind) or kind == "="]
