"""The modules of the package and of the tests, parsed once in each process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the module at ``path``."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
