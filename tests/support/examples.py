"""The examples of docs/commands.md, compared with the output of their commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.support.command import Ended, inside
from tests.support.database import Database

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()


def register(database: Database, *names: str, pattern: str = "order.*") -> None:
    """Make sinks known that take what matches `pattern`, from the beginning on."""
    wanted = [{"name": name, "patterns": [pattern], "start": "beginning"} for name in names]
    with database.connect() as connection:
        connection.execute("select * from outbox_internal.register_sinks(%s, 0, '3:3:', 3)", (json.dumps(wanted),))


def answer(example: str, uid: str) -> Ended:
    """Return the output of an example's command; the event that it names is `uid`."""
    command = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", uid, example.partition("\n")[0])
    program, *arguments = shlex.split(command)
    ended = inside(*arguments)
    assert (program, ended.code, ended.err) == ("outbox-relay", 0, ""), ended
    return ended


def same(text: str) -> str:
    """Return `text` with uids, numbers, people and the width of columns replaced, which differ from run to run."""
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UID", text)
    text = re.sub(r"\S+@\S+", "PERSON", text)
    text = re.sub(r"\d(?:[\d.:T+-]|,(?=\d))*", "0", text)
    return re.sub(r" +", " ", re.sub(r"0 (?:d|h|min|s)(?: 0 (?:h|min|s))? ago", "0 s ago", text))


def examples(group: str) -> list[str]:
    """Return the examples of a group of commands with output that depends on what happened, in the page's order."""
    sections = [section.split("\n## ")[0] for section in PAGE.split(f"\n## {group}")[1:]]
    found = (block for section in sections for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL))
    return [example for block in found for example in block.split("$ ")[1:]]


def assert_true(example: str, uid: str = "", *, instead: Mapping[str, str] | None = None) -> None:
    """Assert that the command of an example prints what the page shows, with texts of the output replaced."""
    printed = answer(example, uid).out
    for text, replacement in (instead or {}).items():
        printed = printed.replace(text, replacement)
    expected = same(example.partition("\n")[2])
    assert same(printed) == expected, printed
