"""Comparing two versions of a catalogue: every difference, and whether it is additive.

A change is additive if readers of the earlier version can read new events, and readers of the new version can read the
events that are already in the log. Both ignore fields that they do not know, unless their schema refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import unquote

ANNOTATIONS: Final = {"title", "description", "examples", "default", "deprecated", "$defs", "readOnly", "writeOnly"}
"""Keywords that no payload is measured by."""
APART: Final = {"type", "properties", "required", "items", "additionalProperties", "anyOf", "$ref"}
"""Keywords that are compared by rules of their own."""
SHOWN_CHARS: Final = 80


@dataclass(frozen=True)
class CatalogueChange:
    """A difference between two versions of a catalogue; ``path`` is a JSON path, or ``$`` for the type itself."""

    type: str
    path: str
    change: str
    additive: bool = False

    def __str__(self) -> str:
        return f"{'additive' if self.additive else 'breaking'}: {self.type} {self.path}: {self.change}"


def changes(earlier: dict[str, Any], later: dict[str, Any]) -> list[CatalogueChange]:
    """Return every difference between two documents of ``documents.json_schema``, by type."""
    before, after = earlier["$defs"], later["$defs"]
    found: list[CatalogueChange] = []
    for name in sorted({*before, *after}):
        if name not in after:
            found.append(CatalogueChange(name, "$", "type removed"))
        elif name not in before:
            found.append(CatalogueChange(name, "$", "new type", additive=True))
        else:
            comparison = _Comparison(name, earlier, later)
            found += comparison.of("$", before[name], after[name])
    return found


class _Comparison:
    """The comparison of one event's schema in two documents."""

    def __init__(self, event_type: str, earlier: dict[str, Any], later: dict[str, Any]) -> None:
        self._type = event_type
        self._earlier = earlier
        self._later = later
        self._under_way: set[tuple[str, str]] = set()

    def of(self, path: str, before: Any, after: Any) -> Iterator[CatalogueChange]:
        """Yield the differences of two schemas at a path; once for definitions that refer to themselves."""
        was, now = _resolved(before, self._earlier), _resolved(after, self._later)
        pair = (json.dumps(_own(was), sort_keys=True), json.dumps(_own(now), sort_keys=True))
        if pair in self._under_way:
            return
        self._under_way.add(pair)
        yield from self._differences(path, was, now)
        self._under_way.remove(pair)

    def _differences(self, path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[CatalogueChange]:
        if "anyOf" in before or "anyOf" in after:
            yield from self._alternatives(path, before, after)
            return
        if (was := _kind(before)) != (now := _kind(after)):
            yield self._change(path, f"type changed from {was} to {now}")
            return
        yield from self._fields(path, before, after)
        if "items" in before or "items" in after:
            yield from self.of(f"{path}[*]", before.get("items", True), after.get("items", True))
        yield from self._others(path, before, after)
        yield from self._rest(path, before, after)

    def _alternatives(self, path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[CatalogueChange]:
        was = [_resolved(each, self._earlier) for each in before.get("anyOf", [before])]
        now = [_resolved(each, self._later) for each in after.get("anyOf", [after])]
        kinds = sorted(map(_kind, was)), sorted(map(_kind, now))
        if kinds[0] != kinds[1]:
            yield self._change(path, f"type changed from {' or '.join(kinds[0])} to {' or '.join(kinds[1])}")
            return
        for one, other in zip(sorted(was, key=_order), sorted(now, key=_order), strict=True):
            yield from self.of(path, one, other)

    def _fields(self, path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[CatalogueChange]:
        was, now = before.get("properties", {}), after.get("properties", {})
        needed, needs = set(before.get("required", ())), set(after.get("required", ()))
        for name in sorted({*was, *now, *needed, *needs}):
            place = f"{path}.{name}"
            if name not in now and name not in needs:
                kind = "required" if name in needed else "optional"
                open_after = after.get("additionalProperties") is not False
                yield self._change(place, f"{kind} field removed", additive=kind == "optional" and open_after)
            elif name not in was and name not in needed:
                kind = "required" if name in needs else "optional"
                open_before = before.get("additionalProperties") is not False
                yield self._change(place, f"new {kind} field", additive=kind == "optional" and open_before)
            else:
                if (name in needed) != (name in needs):
                    yield self._change(place, f"field became {'required' if name in needs else 'optional'}")
                yield from self.of(place, was.get(name, True), now.get(name, True))

    def _others(self, path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[CatalogueChange]:
        """Yield the differences in the fields that no schema names."""
        was, now = before.get("additionalProperties", True), after.get("additionalProperties", True)
        if (was is False) != (now is False):
            yield self._change(path, f"other fields are {'refused' if now is False else 'allowed'} now")
        elif was is not False:
            yield from self.of(f"{path}.*", was, now)

    def _rest(self, path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[CatalogueChange]:
        for name in sorted({*before, *after} - ANNOTATIONS - APART):
            was, now = before.get(name), after.get(name)
            if _canonical(was) != _canonical(now):
                yield self._change(path, f"{name} changed from {_shown(was)} to {_shown(now)}")

    def _change(self, path: str, change: str, *, additive: bool = False) -> CatalogueChange:
        return CatalogueChange(self._type, path, change, additive)


def _resolved(schema: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Return a schema after its references."""
    for _ in range(len(document["$defs"]) + 100):
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        if "$ref" not in schema:
            return schema
        found: Any = document
        for part in unquote(schema["$ref"]).removeprefix("#/").split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
        schema = found
    return schema


def _own(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "$defs"}


def _kind(schema: dict[str, Any]) -> str:
    stated = schema.get("type")
    if isinstance(stated, list):
        return " or ".join(sorted(map(str, cast("list[object]", stated))))
    return str(stated) if stated is not None else "enum" if "enum" in schema or "const" in schema else "any"


def _order(schema: dict[str, Any]) -> tuple[str, str, str]:
    return _kind(schema), str(schema.get("title", "")), json.dumps(schema, sort_keys=True)


def _canonical(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(sorted(json.dumps(each, sort_keys=True) for each in cast("list[object]", value)))
    return json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)[:SHOWN_CHARS]
