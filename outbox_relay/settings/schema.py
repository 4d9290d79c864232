"""The JSON Schema of the file, by which editors complete and check it.

It is shipped as ``relay.schema.json``. What a schema cannot say, such as that a route names a sink, `check` finds.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.fields import Section
from outbox_relay.settings.model import Settings

SHIPPED = Path(__file__).with_name("relay.schema.json")
"""The schema in the package."""


def json_schema() -> dict[str, Any]:
    """Return the schema, with the docstring of each setting as its description."""
    document = Settings.model_json_schema()
    for model in (*tables(), Settings):
        table = document if model is Settings else document["$defs"].get(model.__name__, {})
        for setting, text in _docstrings(model).items():
            if (found := table.get("properties", {}).get(setting)) is not None:
                found["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def tables() -> set[type]:
    """Return the classes of the tables of the file, and those that they extend."""
    return {RetryPolicy, CircuitPolicy, *_extending(Section)}


def _extending(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        if each.__module__.startswith("outbox_relay."):  # a plug-in's are its own
            yield from (each, *_extending(each))


def _docstrings(table: type) -> dict[str, str]:
    """Return the docstrings of the settings in a table by their names in the file."""
    found: dict[str, str] = {}
    for owner in table.__mro__:
        if owner.__module__.startswith("outbox_relay."):
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
            for field, text in pairwise(tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else ()):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(content))),
                    ):
                        found.setdefault("dsn" if name == "dsn_text" else name, " ".join(content.split()))
                    case _:
                        pass
    return found
