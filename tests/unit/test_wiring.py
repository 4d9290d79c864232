"""Sessions are built from parts that no other part changes afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RELAY = Path(__file__).parents[2] / "outbox_relay" / "relay"
MODULES = sorted(RELAY.glob("*.py"))


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement assigns to or deletes, without the tuples around them."""
    found: list[ast.expr] = []
    match node:
        case ast.Assign() | ast.Delete():
            found = list(node.targets)
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor() | ast.NamedExpr() | ast.comprehension():
            found = [node.target]
        case ast.withitem(optional_vars=ast.expr() as variable):
            found = [variable]
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, *_] as arguments):
            found = [ast.Attribute(arguments[0], "?")]
        case _:
            pass
    while found:
        target = found.pop()
        match target:
            case ast.Tuple(elts) | ast.List(elts):
                found += elts
            case ast.Starred(value):
                found.append(value)
            case _:
                yield target


def is_foreign(target: ast.expr) -> bool:
    """Return True for an attribute of another object than self, or an item of one."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if not isinstance(target, ast.Attribute):
        return False
    return not (isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"})


def foreign_assignments(source: str) -> list[str]:
    """Return the assignments to attributes of other objects."""
    nodes = [node for node in ast.walk(ast.parse(source)) if any(map(is_foreign, targets(node)))]
    return [ast.unparse(node) for node in nodes]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_no_part_of_a_session_assigns_to_attributes_of_another(module: Path) -> None:
    assert foreign_assignments(module.read_text()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "other.x = 1",
        "self.x.y = 1",
        "self.x.y += 1",
        "self.x.y: int = 1",
        "del self.x.y",
        "other.x[1] = 2",
        "del other.x[1][2]",
        "(a, [*other.x]) = b",
        "for other.x in y: pass",
        "with y as other.x: pass",
        "setattr(other, 'x', 1)",
        "f().x = 1",
    ],
)
def test_every_form_of_such_an_assignment_is_found(statement: str) -> None:
    assert len(foreign_assignments(statement)) == 1


@pytest.mark.parametrize("statement", ["self.x = 1", "self.x[1] = 2", "del self.x", "x = 1", "x[1] = 2", "cls.x = 1"])
def test_own_attributes_and_variables_may_be_assigned(statement: str) -> None:
    assert foreign_assignments(statement) == []
