"""The structure of the tests: no test module imports another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORT = re.compile(r"^[ \t]*(?:from [\w.]+ )?import (?:\([^)]*\)|[^\n]*)", re.MULTILINE)
"""An import statement, over several lines if it has parentheses."""


def imported(module: str, text: str) -> Iterator[str]:
    """Yield the modules and names that the text of a module of the tests imports, as dotted names."""
    package = module.removesuffix(".py").split("/")[:-1]
    for statement in IMPORT.findall(text):
        node = ast.parse(statement.strip()).body[0]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def test_no_test_module_imports_another() -> None:
    found = [
        f"{path}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in imported(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split(".")[:-1])
    ]
    assert found == []


def test_imports_are_found() -> None:
    text = "import a.b\nfrom .c import (\n    d,\n    e,\n)\ndef f() -> None:\n    from tests import g\n"
    found = list(imported("tests/unit/x.py", text))
    assert found == ["a.b", "tests.unit.c", "tests.unit.c.d", "tests.unit.c.e", "tests", "tests.g"]
