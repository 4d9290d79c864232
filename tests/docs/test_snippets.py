"""Load, parse or run the blocks of code on every page, and parse the command lines."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic_settings import InitSettingsSource

from outbox_relay import settings
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands, mentioned, text
from tests.docs.parsing import COMMON, options, parse, parsers
from tests.support.database import Database

RUN_ELSEWHERE = {
    ("README.md", "sql"),
    ("docs/alembic.md", "python"),
    ("docs/asyncpg.md", "python"),
    ("docs/consumers.md", "python"),
    ("docs/consumers.md", "sql"),
    ("docs/debezium.md", "python"),
    ("docs/debezium.md", "sql"),
    ("docs/django.md", "python"),
    ("docs/emitting.md", "python"),
    ("docs/emitting.md", "sql"),
    ("docs/fastapi.md", "python"),
    ("docs/getting-started.md", "python"),
    ("docs/getting-started.md", "sql"),
    ("docs/kafka.md", "python"),
    ("docs/observability.md", "python"),
    ("docs/operations.md", "python"),
    ("docs/page.md", "python"),
    ("docs/plugins.md", "python"),
    ("docs/queue.md", "sql"),
    ("docs/sqlalchemy.md", "python"),
    ("docs/testing.md", "python"),
    ("docs/tutorial.md", "python"),
    ("docs/webhooks.md", "python"),
}
"""Page and language of blocks that need more than a database. Most of them are run by a test of the page."""
COMMANDS = "docs/commands.md"
EXAMPLE = ROOT / "config" / "relay.example.toml"
"""The configuration that completes a block of settings."""
ORDERS = "create table orders (id bigint primary key, total numeric)"


def of(*languages: str) -> list[Block]:
    """Return the blocks in these languages that no page's own test runs."""
    return [b for b in blocks() if b.language in languages and (b.page, b.language) not in RUN_ELSEWHERE]


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

LINES = {line: str(b) for b in blocks() if b.language in ("sh", "console", "text") for line in commands(b)}


@pytest.mark.parametrize("line", LINES, ids=LINES.values())
def test_command_lines_are_right(line: str) -> None:
    program, *words = shlex.split(line)
    if program in CHECKS:
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


CHECKS: dict[str, Callable[[list[str], str], None]] = {
    "outbox-relay": _outbox_relay,
    "make": _make,
    "pip": _pip,
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


@pytest.mark.parametrize("command", sorted(parsers()))
def test_the_page_of_commands_names_every_option(command: str) -> None:
    section = text(COMMANDS).partition(f"\n## {command.split(maxsplit=1)[0]}")[2].partition("\n## ")[0]
    assert section
    assert not [option for option in options(command) if option not in section and option not in text(COMMANDS)]
