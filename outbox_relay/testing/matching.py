"""Matching events by type, key and a part of the payload, and saying how they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from outbox_relay.testing.reading import EmittedEvent

ANY: Final[Any] = object()
"""The value of an argument that was not given, because None is a key too."""
MOST_SHOWN = 10
"""Maximum number of events that a failure shows."""
MOST_CHARS = 200
"""Maximum length of a value that a failure shows."""


def differences(event: EmittedEvent, type: str, key: Any, payload: Any, headers: Any) -> list[str]:  # noqa: A002
    """Return a line for each difference from what was asked for; none if the event matches."""
    found: list[str] = []
    if event.type != type:
        found.append(f"type: wanted {type!r}, found {event.type!r}")
    if key is not ANY and event.key != key:
        found.append(f"key: wanted {_shown(key)}, found {_shown(event.key)}")
    if payload is not ANY:
        found += _parts("payload", payload, event.payload)
    if headers is not ANY:
        found += _parts("headers", headers, event.headers)
    return found


def _parts(path: str, wanted: Any, found: Any) -> Iterator[str]:
    """Yield a line for each part of ``wanted`` that ``found`` does not have; objects may have other members."""
    if _is_object(wanted) and _is_object(found):
        yield from _members(path, wanted, found)
    elif _is_list(wanted) and _is_list(found):
        if len(wanted) != len(found):
            yield f"{path}: wanted {len(wanted)} elements, found {len(found)}"
            return
        for index, (value, other) in enumerate(zip(wanted, found, strict=True)):
            yield from _parts(f"{path}[{index}]", value, other)
    elif wanted != found or (_is_number(wanted) and isinstance(wanted, bool) != isinstance(found, bool)):
        yield f"{path}: wanted {_shown(wanted)}, found {_shown(found)}"


def _members(path: str, wanted: Mapping[Any, Any], found: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in wanted.items():
        if name in found:
            yield from _parts(f"{path}.{name}", value, found[name])
        else:
            yield f"{path}.{name}: wanted {_shown(value)}, not there"


def _is_number(value: object) -> bool:
    """Return True for numbers and booleans, which Python takes for numbers and JSON does not."""
    return isinstance(value, int | float)


def _is_object(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"


def listed(events: Sequence[EmittedEvent], reasons: Sequence[Sequence[str]]) -> str:
    """Return a paragraph with the events, those that differ least first, and how each differs."""
    if not events:
        return "no event was emitted"
    order = sorted(range(len(events)), key=lambda index: len(reasons[index]))
    lines = ["emitted:"]
    for index in order[:MOST_SHOWN]:
        event = events[index]
        lines.append(f"  {event.type}  key {_shown(event.key)}  payload {_shown(event.payload)}")
        lines += [f"    {reason}" for reason in reasons[index]]
    if len(order) > MOST_SHOWN:
        lines.append(f"  and {len(order) - MOST_SHOWN} more")
    return "\n".join(lines)
