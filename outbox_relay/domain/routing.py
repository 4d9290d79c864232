"""Routes from event types to sinks.

A pattern is a type in which ``*`` matches any number of characters. An event goes to the union of the sinks of all
patterns that match its type. Types that begin with ``outbox.`` are reserved for the relay's own events, called notices:
only a pattern that begins so too matches them. The SQL functions that match types follow the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

TYPE_CHARS = 255
"""Longest event type, in characters."""
RESERVED = "outbox."
"""Prefix of the types of notices, which no application emits."""
NOTICES = "outbox.*"
"""The pattern of notices. Only the sink that ``[notify]`` names has it."""
NOTICE_TYPES = frozenset(
    (
        *("outbox.dead", "outbox.sink.paused", "outbox.sink.lagging", "outbox.sink.recovered"),
        "outbox.retention.blocked",
    )
)
"""The types of notices that the schema makes."""
_VISIBLE = re.compile(r"[!-~]*")
_LIKE_SPECIAL = re.compile(r"[\\%_]")


def canonical(pattern: str) -> str:
    """Return ``pattern`` with every run of ``*`` reduced to one.

    Raises ValueError, without repeating the pattern, if no event type can match it. A type is 1 to 255 visible ASCII
    characters without space.
    """
    if not pattern:
        raise ValueError("is empty: no event type matches it")
    if not _VISIBLE.fullmatch(pattern):
        raise ValueError("matches nothing: an event type holds visible ASCII characters only, and no space")
    if len(pattern.replace("*", "")) > TYPE_CHARS:
        raise ValueError(f"matches nothing: an event type has at most {TYPE_CHARS} characters")
    return re.sub(r"\*+", "*", pattern)


def matches(pattern: str, event_type: str) -> bool:
    """Return True if ``event_type`` matches ``pattern``.

    The time is at most proportional to the product of their lengths.
    """
    if event_type.startswith(RESERVED) and not pattern.startswith(RESERVED):
        return False
    first, *others = pattern.split("*")
    if not others:
        return event_type == pattern
    *middle, last = others
    if len(event_type) < len(first) + len(last) or not event_type.startswith(first) or not event_type.endswith(last):
        return False
    at, end = len(first), len(event_type) - len(last)
    for part in middle:
        found = event_type.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def like_pattern(pattern: str) -> str:
    r"""Return ``pattern`` for SQL's ``LIKE`` with the default escape character ``\``."""
    return _LIKE_SPECIAL.sub(r"\\\g<0>", pattern).replace("*", "%")


def like_patterns(patterns: Iterable[str]) -> tuple[str, ...] | None:
    """Return the patterns of a sink for SQL, or None if they match every type except those of notices."""
    given = tuple(patterns)
    return None if "*" in given and NOTICES not in given else tuple(like_pattern(pattern) for pattern in given)


class SinkRoutes(NamedTuple):
    """The routes that a generation of a sink names: its event-type patterns, and its setting ``claim``."""

    patterns: tuple[str, ...]
    claim: str


@dataclass(frozen=True, slots=True)
class Routes:
    """The table of routes: pattern → names of sinks. Compared by that table.

    Raises ValueError if no event type can match a pattern.
    """

    table: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        """Make the patterns canonical, and merge different spellings of one pattern."""
        table: dict[str, tuple[str, ...]] = {}
        for pattern, sinks in self.table.items():
            name = canonical(pattern)
            table[name] = tuple(dict.fromkeys((*table.get(name, ()), *sinks)))
        object.__setattr__(self, "table", table)

    @property
    def sinks(self) -> frozenset[str]:
        """Every sink with a route."""
        return frozenset(sink for sinks in self.table.values() for sink in sinks)

    def sinks_for(self, event_type: str) -> frozenset[str]:
        """Return the sinks of an event type; empty if no route matches."""
        return frozenset(s for pattern, sinks in self.table.items() if matches(pattern, event_type) for s in sinks)

    def patterns_for(self, sink: str) -> tuple[str, ...]:
        """Return the sorted patterns of ``sink``; only ``*`` if that is one of them."""
        patterns = sorted(pattern for pattern, sinks in self.table.items() if sink in sinks)
        return ("*",) if "*" in patterns else tuple(patterns)
