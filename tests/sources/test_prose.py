"""The English of the package: imperative docstrings, and no phrases that read as a translation."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

from tests.support.sources import nodes

pytestmark = pytest.mark.xdist_group("sources")  # parse each module once

PACKAGE = Path(__file__).parents[2] / "outbox_relay"
UNDONE: list[str] = []
"""Rooms whose prose is not yet rewritten; none of them may be added again."""
IMPERATIVE_SHARE = 0.8

HEADLESS = {"What", "Whatever", "Whether", "Who", "Whoever", "Which", "Where", "When", "How"}
"""First words of a docstring that begins with a clause in place of a verb or a noun."""
PHRASES = re.compile(
    r"\b(anew|for ever|forever|whoever|nobody|goes on|stands|stood|so many|(is|are|was|were) told)\b"
    r"|\bor nothing\b(?! to\b)|; nothing:|(?<!\bdo )(?<!\bdoes )\bnothing (when|if)\b",
    re.IGNORECASE,
)
NO_VERB = re.compile(
    r"A|All|An|And|Any|As|At|Because|Both|By|Can|Done|Each|Either|Every|Few|For|From|Had|Has|Have|If|In|Into|It|"
    r"Its|Last|Least|Most|Neither|New|Next|No|None|Not|Nothing|Of|On|Once|One|Only|Or|Other|Our|Over|Same|"
    r"Seconds|Such|That|The|Their|Then|There|These|They|This|Those|To|Too|Two|Under|Until|Up|Upon|Was|With|"
    r"Without"
)
"""Capitalised first words that are not verbs, other than those that end in one s."""
CODE = re.compile(r"``[^`]*``|`[^`]*`|\"\w+\"")
"""Quoted code, and literals of one word, which are values: the user of that name is not prose."""

FSTRING_MIDDLE: int = getattr(tokenize, "FSTRING_MIDDLE", -1)
"""The text of an f-string from Python 3.12 on; before, an f-string is one STRING."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """A docstring, comment or string literal, and its place."""

    where: str
    text: str


def modules(room: str) -> list[Path]:
    """Return the modules of a room, which is a folder or one module."""
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def rooms() -> list[str]:
    """Return the names of all rooms."""
    modules_and_folders = [path for path in PACKAGE.iterdir() if path.suffix in ("", ".py")]
    return sorted(path.stem for path in modules_and_folders if not path.name.startswith("__"))


def done() -> list[str]:
    """Return the rooms whose prose is checked."""
    return [room for room in rooms() if room not in UNDONE]


@cache
def docstrings(room: str) -> Sequence[tuple[Documented, Text]]:
    """Return every docstring of a room with the node it belongs to."""
    return [*docstrings_of(modules(room))]


def docstrings_of(paths: Sequence[Path]) -> Iterator[tuple[Documented, Text]]:
    """Yield every docstring of the modules with the node it belongs to."""
    for path in paths:
        for node in nodes(path):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                line = getattr(node, "lineno", 1)
                yield node, Text(f"{path.relative_to(PACKAGE.parent)}:{line}", text)


@cache
def written(room: str) -> Sequence[Text]:
    """Return every comment and string literal of a room, docstrings included."""
    return [
        Text(f"{path.relative_to(PACKAGE.parent)}:{token.start[0]}", token.string)
        for path in modules(room)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == FSTRING_MIDDLE
    ]


def first_word(text: str) -> str:
    """Return the first word of a docstring."""
    return text.split(maxsplit=1)[0].rstrip(".,:;")


def is_property(node: Documented) -> bool:
    """Return True for a property, whose docstring is a noun phrase."""
    if not isinstance(node, ast.FunctionDef):
        return False
    names = {getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter", "computed_field"})


def is_function(node: Documented) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return True for a function or method that is no property."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)


def is_imperative(text: str) -> bool:
    """Return True if the first word may be a verb in the imperative."""
    word = first_word(text)
    return (
        bool(re.fullmatch(r"[A-Z][a-z]+", word))
        and word not in HEADLESS
        and not re.search("[^s]s$", word)
        and not NO_VERB.fullmatch(word)
    )


@pytest.mark.parametrize("room", done())
def test_no_docstring_begins_with_a_headless_clause(room: str) -> None:
    assert [text for _, text in docstrings(room) if first_word(text.text) in HEADLESS] == []


@pytest.mark.parametrize("room", done())
def test_no_description_of_a_variable_begins_with_a_headless_clause(room: str) -> None:
    descriptions = [text for text in written(room) if text.text.startswith('"""') and text.text.strip('"').strip()]
    assert [text for text in descriptions if first_word(text.text.strip('"')) in HEADLESS] == []


@pytest.mark.parametrize("room", done())
def test_no_phrase_reads_as_a_translation(room: str) -> None:
    found = [(text.where, phrase[0]) for text in written(room) for phrase in PHRASES.finditer(CODE.sub("", text.text))]
    assert found == []


@pytest.mark.parametrize("room", done())
def test_docstrings_of_functions_are_imperative(room: str) -> None:
    functions = [text for node, text in docstrings(room) if is_function(node)]
    others = [text for text in functions if not is_imperative(text.text)]
    assert len(others) <= (1 - IMPERATIVE_SHARE) * len(functions), others


SQL_COMMENT = re.compile(r"(?:^|\s)--(?: (.*))?$")
SQL_FILES = sorted([*(PACKAGE.parent / "schema").glob("*.sql"), *(PACKAGE / "postgres" / "sql").glob("*.sql")])


def comments_of(path: Path) -> list[Text]:
    """Return every comment of a file of SQL, in which consecutive lines are one comment."""
    found: list[Text] = []
    continues = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if comment := SQL_COMMENT.search(line):
            words = comment[1] or ""
            if continues and line.lstrip().startswith("--"):
                found[-1] = found[-1]._replace(text=f"{found[-1].text} {words}")
            else:
                found.append(Text(f"{path.name}:{number}", words))
        continues = comment is not None
    return found


@pytest.mark.parametrize("path", SQL_FILES, ids=[path.name for path in SQL_FILES])
def test_no_comment_of_sql_reads_as_a_translation(path: Path) -> None:
    comments = [comment for comment in comments_of(path) if comment.text.strip()]
    assert [comment for comment in comments if first_word(comment.text) in HEADLESS] == []
    assert [comment for comment in comments if PHRASES.search(CODE.sub("", comment.text))] == []


def test_comments_of_sql_are_found() -> None:
    assert len(SQL_FILES) > 50
    assert all(comments_of(path) for path in SQL_FILES if path.parent.name == "schema")


TESTS = Path(__file__).parents[1]
FOLDERS = sorted(path.name for path in TESTS.iterdir() if (path / "__init__.py").exists() or path.name == "unit")
TEST_PHRASES = re.compile(r"\b(anew|for ever|forever|whoever|somebody|nobody|so many)\b", re.IGNORECASE)
HEADLESS_TESTS = HEADLESS - {"When", "Which", "Whatever"}


def texts_of_tests(folder: str) -> Iterator[Text]:
    """Yield every docstring, description of a variable and comment of the tests in a folder."""
    for path in sorted((TESTS / folder).rglob("*.py")):
        source = path.read_text()
        for node in nodes(path):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield Text(f"{path.relative_to(TESTS)}:{node.lineno}", node.value.value)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield Text(f"{path.relative_to(TESTS)}:{token.start[0]}", token.string)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_text_of_the_tests_reads_as_a_translation(folder: str) -> None:
    texts = [text for text in texts_of_tests(folder) if text.text.strip()]
    assert [text for text in texts if first_word(text.text) in HEADLESS_TESTS] == []
    assert [text for text in texts if TEST_PHRASES.search(CODE.sub("", text.text))] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_helpers_and_fixtures_are_imperative(folder: str) -> None:
    """Those of tests need not be: they give the reason or the story of a case whose name says what holds."""
    paths = sorted((TESTS / folder).rglob("*.py"))
    helpers = [text for node, text in docstrings_of(paths) if is_function(node) and not node.name.startswith("test_")]
    assert [text for text in helpers if not is_imperative(text.text)] == []


def test_undone_rooms_exist() -> None:
    assert set(UNDONE) <= set(rooms())
