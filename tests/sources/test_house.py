"""The structure of the code: names that are unique, functions that are short, tests that do not import each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import nodes

pytestmark = pytest.mark.xdist_group("sources")  # parse each module once

ROOT = Path(__file__).parents[2]
MAX_LINES = 35
"""Maximum number of lines of the body of a function, without its docstring."""

MAX_FILE_LINES = 400
"""Maximum number of lines of a module of the package."""

IMPORT = re.compile(r"^[ \t]*(?:from [\w.]+ )?import (?:\([^)]*\)|[^\n]*)", re.MULTILINE)
"""An import statement, over several lines if it has parentheses."""

OF_DJANGO = {"Command", "Meta", "Migration"}
"""Names of classes that Django looks for."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, Sequence[ast.AST]]:
    """Return the nodes of the modules of the package by their path in the project."""
    return {str(path.relative_to(ROOT)): nodes(path) for path in sorted((ROOT / "outbox_relay").rglob("*.py"))}


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


def lines_of(function: Function) -> int:
    """Return the number of lines of the body of a function, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_two_classes_of_the_package_have_one_name() -> None:
    classes = [
        (node.name, module)
        for module, tree in trees().items()
        for node in tree
        if isinstance(node, ast.ClassDef)
        if not (node.name in OF_DJANGO and "/contrib/django/" in module)
    ]
    times = Counter(name for name, _ in classes)
    assert sorted(each for each in classes if times[each[0]] > 1) == []


def test_functions_of_the_package_are_short() -> None:
    long = [
        f"{module}:{node.lineno} {node.name}: {lines_of(node)}"
        for module, tree in trees().items()
        for node in tree
        if isinstance(node, Function) and lines_of(node) > MAX_LINES
    ]
    assert long == []


def test_files_of_the_package_are_short() -> None:
    paths = sorted((ROOT / "outbox_relay").rglob("*.py"))
    assert len(paths) > 100
    sizes = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}


def assigned(target: ast.expr) -> Iterator[ast.Attribute]:
    """Yield the attributes that an assignment to a target sets, also within tuples and lists."""
    if isinstance(target, ast.Attribute):
        yield target
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from assigned(each)
    elif isinstance(target, ast.Starred):
        yield from assigned(target.value)


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to; nothing if it is no assignment."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        return [node.target]
    if isinstance(node, ast.withitem):
        return [node.optional_vars] if node.optional_vars is not None else []
    return []


def foreign(tree: Sequence[ast.AST]) -> list[str]:
    """Return the assignments to attributes of other objects than `self`."""
    return [
        f"{attribute.lineno}: {ast.unparse(attribute)}"
        for node in tree
        for target in targets_of(node)
        for attribute in assigned(target)
        if not (isinstance(attribute.value, ast.Name) and attribute.value.id == "self")
    ]


def test_parts_of_the_relay_set_no_attribute_of_another() -> None:
    found = {module: foreign(tree) for module, tree in trees().items() if module.startswith("outbox_relay/relay/")}
    assert len(found) > 20
    assert {module: places for module, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "text",
    ["a.b = 1", "self.a.b = 1", "self.c, (d, *a.b) = x", "a.b += 1", "a.b: int = 1", "for a.b in c: pass", "del a.b",
     "with c as a.b: pass"],
)  # fmt: skip
def test_attributes_of_others_are_found(text: str) -> None:
    assert len(foreign([*ast.walk(ast.parse(text))])) == 1
    assert foreign([*ast.walk(ast.parse("self.a = b.c; self.d, e = f; g[0] = 1"))]) == []


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
