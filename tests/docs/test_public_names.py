"""The modules that applications import: each says in ``__all__`` which of its names are public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.support import django_site

django_site.set_up()
PUBLIC = (
    "outbox_relay",
    "outbox_relay.catalogue",
    "outbox_relay.contrib.alembic",
    "outbox_relay.contrib.asyncpg",
    "outbox_relay.contrib.django",
    "outbox_relay.contrib.sqlalchemy",
    "outbox_relay.inbox",
    "outbox_relay.outbox",
    "outbox_relay.sinks",
    "outbox_relay.sinks.contract",
    "outbox_relay.testing",
    "outbox_relay.ui",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_its_names(name: str) -> None:
    module = import_module(name)
    names: list[str] = module.__all__
    assert names == sorted(names, key=lambda each: (not each.isupper(), not each[0].isupper(), each))
    assert len(names) == len(set(names))
    assert [each for each in names if not hasattr(module, each)] == []
    undocumented = [each for each in names if callable(getattr(module, each)) and not getattr(module, each).__doc__]
    assert undocumented == []
    assert {"emit", "emit_many", "aemit", "aemit_many", "once", "aonce"} & vars(module).keys() <= {*names}


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of the package in a piece of code; none in the head of a function."""
    with suppress(SyntaxError):
        yield from _imports(ast.parse(text))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outbox_relay":
            yield from ((str(node.module), alias.name) for alias in node.names)


def shown() -> Iterator[tuple[str, str]]:
    """Yield code that applications take over, with its place."""
    for block in blocks():
        if block.language == "python":
            yield str(block), block.text
    for example in sorted((ROOT / "examples").rglob("*.py")):
        yield str(example.relative_to(ROOT)), Path(example).read_text(encoding="utf-8")


def test_pages_and_examples_import_public_names_alone() -> None:
    found = {(place, *each) for place, text in shown() for each in imports(text)}
    assert found
    others = [
        (place, module, name)
        for place, module, name in sorted(found)
        if f"{module}.{name}" not in PUBLIC
        if module not in PUBLIC or name not in import_module(module).__all__
    ]
    assert others == []
