"""The catalogue of a module of the application: loading it, and comparing it with the log and with a release."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypedDict, cast

from outbox_relay.admin.text import replace_unprintable
from outbox_relay.catalogue.changes import CatalogueChange, changes
from outbox_relay.catalogue.conformity import PayloadValidator
from outbox_relay.catalogue.declaration import EventDeclaration, declaration_of
from outbox_relay.catalogue.documents import FORM, MARK, json_schema
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres.store import Store

PORTION_BYTES: Final = 8 << 20
"""Payloads that are read with one statement, in bytes, unless a single one is larger."""
FILE_BYTES: Final = 16 << 20
"""Largest file of a release."""


class TypeReport(TypedDict):
    """The comparison of the newest events of a type: their number, and the first difference."""

    type: str
    events: int
    difference: dict[str, str] | None


class LogReport(TypedDict):
    """The comparison of the log with a catalogue; ``undeclared`` are types of the log that it does not have."""

    types: list[TypeReport]
    undeclared: list[str]


def load(name: str) -> dict[str, EventDeclaration]:
    """Import a module of the application, and return the declarations in it and in its submodules, by type.

    Raises ``ConfigurationError`` if it cannot be imported, has no declaration, or has two of one type.
    """
    module = _imported(name)
    found: dict[str, EventDeclaration] = {}
    for declaration in _declarations(module):
        other = found.setdefault(declaration.type, declaration)
        if other is not declaration:
            names = " and ".join(f"{each.of.__module__}.{each.of.__qualname__}" for each in (other, declaration))
            raise ConfigurationError(f"type {declaration.type} is declared twice, by {names}: remove one")
    if not found:
        raise ConfigurationError(f"module {name} has no class with @event of outbox_relay.catalogue")
    return found


def _imported(name: str) -> ModuleType:
    """Import a module, also from the working directory. What it prints goes to stderr."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"module {name[:100]} could not be imported: {_cause(error)}") from None


def _cause(error: BaseException) -> str:
    """Return the class and place of an error, with its message if that names only modules."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, ImportError):
        return f"{error}{place}; run the command where the module is, or name its folder in PYTHONPATH"
    return f"{type(error).__name__}{place}"


def _declarations(module: ModuleType) -> Iterator[EventDeclaration]:
    inside = [each for name, each in sorted(sys.modules.items()) if name.startswith(f"{module.__name__}.")]
    for each in (module, *inside):
        for value in list(vars(each).values()):
            if (found := declaration_of(value)) is not None:
                yield found


def document(name: str, title: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of a module. Raises as ``load``."""
    return schema_of(load(name), title or f"Events of {name}")


def schema_of(declared: dict[str, EventDeclaration], title: str) -> dict[str, Any]:
    """Return the JSON Schema of declarations. Raises ``ConfigurationError`` if a class has none."""
    for each in declared.values():
        try:
            each.schema("#/{name}")
        except ImportError:
            raise
        except Exception as error:
            where = f"{each.of.__module__}.{each.of.__qualname__}"
            raise ConfigurationError(f"{where} has no JSON Schema: {type(error).__name__}; check its fields") from None
    return json_schema(declared, title)


def against(name: str, file: Path) -> list[CatalogueChange]:
    """Return the differences of a module from the document of a release. Raises ``ConfigurationError``."""
    earlier = _read(file)
    later = document(name)
    try:
        return changes(earlier, later)
    except (AttributeError, KeyError, RecursionError, TypeError):
        raise ConfigurationError(f"{file}: has a schema that cannot be compared; print it again") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_BYTES + 1)
        found: Any = json.loads(text) if len(text) <= FILE_BYTES else None
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    stated = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if not (stated.get(MARK) == FORM and isinstance(stated.get("$defs"), dict)):
        raise ConfigurationError(f"{file}: is no document that outbox-relay catalogue jsonschema has printed")
    return stated


def compare(store: Store, validator: PayloadValidator, newest: int, look_back: int) -> LogReport:
    """Compare the ``newest`` events of each type with their schema, among the last ``look_back`` events of the log."""
    rows = store.named("catalogue_newest", {"newest": newest, "look_back": look_back})
    listed: dict[str, list[Any]] = {name: [] for name in validator.types}
    for row in rows:
        if row.type in listed:
            listed[row.type].append(row)
    return {
        "types": [_of_type(store, validator, name, events) for name, events in listed.items()],
        "undeclared": sorted({replace_unprintable(row.type) for row in rows} - listed.keys()),
    }


def _of_type(store: Store, validator: PayloadValidator, name: str, events: Sequence[Any]) -> TypeReport:
    for portion in _portions(events):
        for row in store.named("catalogue_payloads", {"ids": [each.id for each in portion]}):
            if (found := validator.difference(name, row.content_type, row.payload)) is not None:
                shown = {"uid": str(row.uid), "path": found.path, "expected": found.expected, "found": found.found}
                difference = {part: replace_unprintable(text) for part, text in shown.items()}
                return {"type": name, "events": len(events), "difference": difference}
    return {"type": name, "events": len(events), "difference": None}


def _portions(events: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the events in portions of at most ``PORTION_BYTES``, or of one event."""
    portion: list[Any] = []
    for event in events:
        if portion and sum(each.bytes for each in portion) + event.bytes > PORTION_BYTES:
            yield portion
            portion = []
        portion.append(event)
    if portion:
        yield portion


def report_text(report: LogReport) -> str:
    """Return a line for each type."""
    lines: list[str] = []
    for each in report["types"]:
        count = f"{each['events']} event{'' if each['events'] == 1 else 's'}"
        if (found := each["difference"]) is None:
            lines.append(f"{each['type']}: {count}, no difference" if each["events"] else f"{each['type']}: no events")
        else:
            where = f"{found['path']}: expected {found['expected']}, found {found['found']}"
            lines.append(f"{each['type']}: {where} (event {found['uid']})")
    return "\n".join(lines)
