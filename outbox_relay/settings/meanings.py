"""The meaning of a setting: the docstring below its field.

The source is read when a message needs it. pydantic would read that of every model at the start of each command.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def meaning(model: type[BaseModel], setting: str) -> str:
    """Return the first sentence about ``setting``, its name in the file, or an empty string without source."""
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    name = names.get(setting, setting)
    for owner in model.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            docstring = _docstrings(owner).get(name, "")
            return " ".join(docstring.split()).partition(". ")[0].rstrip(".")
    return ""


@cache
def _docstrings(owner: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except OSError:
        return {}
    statements = (statement for each in tree.body if isinstance(each, ast.ClassDef) for statement in each.body)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
