"""Figures of the database, as one relay stores them and every relay reads them. Pure.

Another version of the relay, or a person, may have written them. Everything that is not as expected is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, cast

from outbox_relay.service.metrics.definitions import FIGURES, GROUPS, PER_SINK, STATES, TABLES, Definition

FORMAT: Final = 1
"""The format of figures that this version writes and reads."""
KEPT_ROUNDS, KEPT_SECONDS = 3, 30.0
"""Rounds after which figures are too old, and the least time for that."""
MOST_ENTRIES: Final = 2500
"""Maximum number of entries that are read."""
MOST_VALUES: Final = 3000
"""Maximum number of values of one entry that are read."""
MOST_EVERY_SECONDS: Final = 3600.0
"""Maximum interval of an entry that is believed."""

_SINK: Final = re.compile(r"(?!.*__)[a-z][a-z0-9_]{0,39}")
_BY_NAME: Final = {definition.name: definition for definition in FIGURES}


class Value(NamedTuple):
    """The value of a metric with the values of its labels, in their order."""

    name: str
    labels: tuple[str, ...]
    value: float


class Entry(NamedTuple):
    """One group of figures, or one sink's part of it.

    ``at`` is the time by the database's clock at which it began to be measured, a POSIX time, and ``every`` the
    interval in seconds at which that is repeated. With ``failed`` there may be no values.
    """

    group: str
    sink: str | None
    at: float
    every: float
    failed: bool
    values: tuple[Value, ...]

    @property
    def kept_seconds(self) -> float:
        """The age from which on the entry is unknown."""
        return max(KEPT_SECONDS, KEPT_ROUNDS * self.every)


def dump(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return entries as a JSON object."""
    return {
        "format": FORMAT,
        "entries": [
            {**entry._asdict(), "values": [[v.name, list(v.labels), v.value] for v in entry.values]}
            for entry in entries
        ],
    }


def load(stored: object, now: float) -> list[Entry]:
    """Return the entries of a stored object that can be understood and are not too old at ``now``. Never raises."""
    if not isinstance(stored, Mapping):
        return []
    found = cast("Mapping[str, object]", stored)
    entries = found.get("entries")
    if found.get("format") != FORMAT or not isinstance(entries, list):
        return []
    loaded = (_entry(each) for each in cast("list[object]", entries)[:MOST_ENTRIES])
    return [entry for entry in loaded if entry is not None and 0.0 <= now - entry.at < entry.kept_seconds]


def _entry(stored: object) -> Entry | None:
    if not isinstance(stored, Mapping):
        return None
    found = cast("Mapping[str, object]", stored)
    group, sink, at, every = (
        found.get("group"),
        found.get("sink"),
        _number(found.get("at")),
        _number(found.get("every")),
    )
    if not isinstance(group, str) or group not in GROUPS or at is None or every is None:
        return None
    if not (_is_sink(sink) if group in PER_SINK else sink is None):
        return None
    values = found.get("values")
    read = (
        [_value(each, group) for each in cast("list[object]", values)[:MOST_VALUES]] if isinstance(values, list) else []
    )
    known = {(value.name, value.labels): value for value in read if value is not None and _is_of(value, sink)}
    return Entry(
        group,
        cast("str | None", sink),
        at,
        min(every, MOST_EVERY_SECONDS),
        found.get("failed") is not False,
        tuple(known.values()),
    )


def _is_of(value: Value, sink: object) -> bool:
    """Return True if a value is of the sink of its entry, if that has one."""
    return sink is None or value.labels[:1] == (sink,)


def _value(stored: object, group: str) -> Value | None:
    if not isinstance(stored, list) or len(cast("list[object]", stored)) != 3:
        return None
    name, labels, number = cast("list[object]", stored)
    definition = _BY_NAME.get(name) if isinstance(name, str) else None
    value = _number(number)
    if definition is None or definition.group != group or value is None or not isinstance(labels, list):
        return None
    texts = tuple(label for label in cast("list[object]", labels)[:4] if isinstance(label, str))
    return Value(definition.name, texts, value) if _are_labels(definition, texts) else None


def _are_labels(definition: Definition, labels: tuple[str, ...]) -> bool:
    return len(labels) == len(definition.labels) and all(map(_is_label, definition.labels, labels))


def _is_label(name: str, value: str) -> bool:
    match name:
        case "sink":
            return _is_sink(value)
        case "state":
            return value in STATES
        case _:
            return value in TABLES


def _is_sink(value: object) -> bool:
    return isinstance(value, str) and _SINK.fullmatch(value) is not None


def _number(value: object) -> float | None:
    """Return a finite number that is not negative, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0.0 else None
