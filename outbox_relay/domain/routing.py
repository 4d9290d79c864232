"""Routes: which sinks an event goes to by its type.

A pattern is a type in which ``*`` stands for any run of characters, the empty one among them; everything else
stands for itself. An event goes to the union of the sinks of all patterns that match its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

TYPE_CHARS = 255
"""Longest event type, in characters."""
REMEMBERED_TYPES = 4096
"""Types whose sinks are remembered at once, at most."""

_VISIBLE = re.compile(r"[!-~]*")
_LIKE_SPECIAL = re.compile(r"[\\%_]")


def canonical(pattern: str) -> str:
    """``pattern`` with every run of ``*`` made one.

    Raises ValueError, with a reason that does not repeat the pattern, when no event type can match it: types
    are 1 to 255 visible ASCII characters without space.
    """
    if not pattern:
        raise ValueError("is empty: no event type matches it")
    if not _VISIBLE.fullmatch(pattern):
        raise ValueError("matches nothing: an event type holds visible ASCII characters only, and no space")
    if len(pattern.replace("*", "")) > TYPE_CHARS:
        raise ValueError(f"matches nothing: an event type has at most {TYPE_CHARS} characters")
    return re.sub(r"\*+", "*", pattern)


def matches(pattern: str, event_type: str) -> bool:
    """Whether ``event_type`` matches ``pattern``, in time linear in the pattern times the type."""
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


def like(pattern: str) -> str:
    r"""``pattern`` for the right side of SQL's ``LIKE``, whose escape character is the default ``\``."""
    return _LIKE_SPECIAL.sub(r"\\\g<0>", pattern).replace("*", "%")


@dataclass(frozen=True, slots=True)
class Routes:
    """The table of routes: pattern → names of sinks. Equal when the tables are.

    Raises ValueError when a pattern can match nothing.
    """

    table: Mapping[str, tuple[str, ...]]
    _by_type: dict[str, frozenset[str]] = field(
        default_factory=dict[str, frozenset[str]], init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Make the patterns canonical; spellings of one pattern are joined."""
        table: dict[str, tuple[str, ...]] = {}
        for pattern, sinks in self.table.items():
            name = canonical(pattern)
            table[name] = _without_repeats((*table.get(name, ()), *sinks))
        object.__setattr__(self, "table", table)

    @property
    def sinks(self) -> frozenset[str]:
        """Every sink that some route leads to."""
        return frozenset(sink for sinks in self.table.values() for sink in sinks)

    def sinks_for(self, event_type: str) -> frozenset[str]:
        """The sinks that an event of this type goes to; none when no route matches."""
        found = self._by_type.get(event_type)
        if found is None:
            if len(self._by_type) >= REMEMBERED_TYPES:
                self._by_type.clear()
            found = frozenset(s for pattern, sinks in self.table.items() if matches(pattern, event_type) for s in sinks)
            self._by_type[event_type] = found
        return found

    def routed(self, event_type: str) -> bool:
        """Whether any route matches this type."""
        return bool(self.sinks_for(event_type))

    def patterns_for(self, sink: str) -> tuple[str, ...]:
        """The patterns that lead to ``sink``, sorted; just ``*`` when that is among them."""
        patterns = sorted(pattern for pattern, sinks in self.table.items() if sink in sinks)
        return ("*",) if "*" in patterns else tuple(patterns)


def _without_repeats(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
