"""The table of cases names tests that exist, for each of the 67."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
ROW = re.compile(r"\| (\d+) \| [^|]+ \| ([^|]+) \|")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[int, str]:
    """Case → its last column."""
    return {
        int(found[1]): found[2] for line in (HERE / "CASES.md").read_text().splitlines() if (found := ROW.match(line))
    }


@cache
def functions(path: Path) -> frozenset[str]:
    """Return the functions of a module."""
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_case_has_its_tests_or_a_reason_why_not() -> None:
    found = rows()
    assert list(found) == list(range(1, 68))
    assert [case for case, text in found.items() if not NAMED.search(text) and not text.startswith("none: ")] == []


def test_the_tests_that_are_named_exist() -> None:
    named = [(path, name) for text in rows().values() for path, name in NAMED.findall(text)]
    assert [f"{path}::{name}" for path, name in named if name not in functions(TESTS / path)] == []


def test_every_test_of_a_case_is_in_the_table() -> None:
    named = {name for text in rows().values() for _, name in NAMED.findall(text)}
    cases = {name for path in HERE.glob("test_cases_*.py") for name in functions(path) if name.startswith("test_case_")}
    assert cases - named == set()
