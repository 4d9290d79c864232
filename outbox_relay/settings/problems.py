"""Problems of a configuration and the words for them. No value of a setting appears here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

SettingPath: TypeAlias = tuple[str | int, ...]
"""The place of a setting: names of tables and keys, numbers of list items from 0."""

PREFIX = "OUTBOX_RELAY_"
"""How every variable of the relay begins."""
NAMED = 12
"""Most valid names listed in a message."""
NAME_CHARS = 80
"""Most characters of a name that a message repeats."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of the setting at ``path``; ``text`` names it and what is allowed."""

    path: SettingPath
    text: str


class InvalidSetting(ValueError):
    """Several problems of one value, raised by a validator; their paths are relative to the value.

    With ``in_table`` they are relative to the table that holds it.
    """

    def __init__(self, problems: Iterable[Problem], *, in_table: bool = False) -> None:
        self.problems = tuple(problems)
        self.in_table = in_table
        super().__init__("; ".join(problem.text for problem in self.problems))


def dotted(path: SettingPath) -> str:
    """Return ``path`` as TOML writes it: ``sinks.crm.retry.attempts``, ``sinks.crm.secrets[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in path).removeprefix(".")


def _key(name: str) -> str:
    shown = name if len(name) <= NAME_CHARS else name[:NAME_CHARS] + "…"
    return shown if re.fullmatch(r"[A-Za-z0-9_-]+", shown) else json.dumps(shown, ensure_ascii=not shown.isprintable())


def variable(path: SettingPath) -> str:
    """Return the environment variable that sets ``path``."""
    return PREFIX + "__".join(str(step) for step in path).upper().replace(".", "_")


def suggestion(name: str, valid: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return the valid name nearest to ``name``, ignoring case, or else a list of them, each as ``shown`` writes it."""
    names = {other.lower(): shown(other) for other in sorted(valid)}
    if near := get_close_matches(name.lower(), names, 1):
        return f"did you mean {names[near[0]]}?"
    listed = list(names.values())
    return f"valid: {', '.join(listed[:NAMED])}{', …' if len(listed) > NAMED else ''}" if listed else "there are none"
