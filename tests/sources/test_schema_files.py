"""The files of the schema: each thing is defined once, in the file for it, and is commented; none goes unused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import outbox_relay
from outbox_relay.postgres.schema import SCHEMA_FOLDER

MOST = {"lines": 9261, "functions": 217, "tables": 29, "triggers": 6}
"""The greatest numbers of the whole schema. A change that needs more says why."""
PACKAGE = Path(outbox_relay.__file__).parent
FILES = sorted(SCHEMA_FOLDER.rglob("*.sql"))
DEFINED = re.compile(r"^create or replace function (outbox(?:_internal)?)\.(\w+)\(", re.MULTILINE)
PARTS = {
    "tables": r"create (?:unlogged )?(?:schema|table|sequence|type)|create (?:unique )?index|comment on|alter |insert",
    "functions": r"create or replace function|comment on function",
    "views.sql": r"create or replace view|comment on view",
    "triggers.sql": r"create or replace trigger|alter table",
    "debezium.sql": r"create or replace function|comment on function",
    "grants.sql": r"do \$",
    "role_settings.sql": r"do \$",
}
"""Folder or file → what its statements may begin with."""


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a file, without comments and without what is in dollar quotes."""
    text = re.sub(r"(\$\w*\$).*?\1", "$$", re.sub(r"^\s*--.*$", "", text, flags=re.MULTILINE), flags=re.DOTALL)
    text = re.sub(r"\bbegin atomic\b.*?^end", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from filter(None, (piece.strip() for piece in re.sub(r"'[^']*'", "''", text).split(";")))


def code(path: Path) -> str:
    """Return a file without its comments."""
    return re.sub(r"--.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def defined() -> list[tuple[str, str]]:
    """Return schema and name of every function, as often as it is defined."""
    return [(found[1], found[2]) for path in FILES for found in DEFINED.finditer(path.read_text(encoding="utf-8"))]


def test_each_function_is_defined_once() -> None:
    assert [name for name, count in Counter(name for _, name in defined()).items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SCHEMA_FOLDER).as_posix())
def test_a_file_holds_what_its_place_is_for(path: Path) -> None:
    place = path.relative_to(SCHEMA_FOLDER).parts[0]
    if place == "migrations":
        return
    allowed = PARTS[place] + (r"|do \$" if path.stem == "00_expressions" else "")  # uuid7() of newer servers
    odd = [piece for piece in statements(path.read_text(encoding="utf-8")) if not re.match(allowed, piece)]
    assert [piece[:80] for piece in odd] == []


@pytest.mark.parametrize("kind", ["table", "view", "sequence", "schema"])
def test_tables_and_views_have_comments(kind: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    made = set(re.findall(rf"^create (?:or replace |unlogged )*{kind} ([\w.]+)", text, re.MULTILINE))
    partitions = set(re.findall(r"^create table ([\w.]+) partition of", text, re.MULTILINE))
    assert made - partitions - set(re.findall(rf"^comment on {kind} ([\w.]+) is", text, re.MULTILINE)) == set()


def test_what_people_call_has_a_comment_beside_it() -> None:
    """Goes red when a function of schema outbox is not in the manual that \\df+ outbox.* prints."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        made = {name for schema, name in DEFINED.findall(text) if schema == "outbox"}
        assert made == set(re.findall(r"^comment on function outbox\.(\w+) is", text, re.MULTILINE)), path.name


def test_every_internal_function_is_called() -> None:
    """By another function, a trigger, a table, or a statement of the package. outbox.privilege calls none."""
    callers = [path for path in FILES if path.name != "views.sql"]
    callers += [path for path in PACKAGE.rglob("*.*") if path.suffix in {".sql", ".py"}]
    text = DEFINED.sub("", "\n".join(code(path) for path in callers))
    called = set(re.findall(r"\boutbox_internal\.(\w+)", text))
    assert {name for schema, name in defined() if schema == "outbox_internal"} - called == set()


def test_the_schema_does_not_grow() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    sizes = {
        "lines": text.count("\n"),
        "functions": len(defined()),
        "tables": len(re.findall(r"^create table (?!\S+ partition of)", text, re.MULTILINE)),
        "triggers": len(re.findall(r"^create or replace trigger", text, re.MULTILINE)),
    }
    assert {name: size for name, size in sizes.items() if size > MOST[name]} == {}, sizes
