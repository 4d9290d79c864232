"""Problems of a configuration: where they stand, and the words for them. No value of a setting passes through here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

Path = tuple[str | int, ...]
"""Where a setting stands: names of tables and keys, numbers of list items from 0."""

PREFIX = "OUTBOX_RELAY_"
"""How every variable of the relay begins."""
NAMED = 12
"""Valid names listed in a message, at most."""
NAME_CHARS = 80
"""Characters of a name from the file or the environment that a message repeats, at most."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong at ``path``; ``text`` says what, and what is allowed instead."""

    path: Path
    text: str


class Wrong(ValueError):
    """Several problems of one value, raised by a validator.

    ``problems`` is relative to the value that is validated; with ``beside`` to the table in which it stands.
    """

    def __init__(self, problems: Iterable[Problem], *, beside: bool = False) -> None:
        """Take the problems, which never hold the value itself."""
        self.problems = tuple(problems)
        self.beside = beside
        super().__init__("; ".join(problem.text for problem in self.problems))


def place(path: Path) -> str:
    """``path`` as it would be written in TOML: ``sinks.crm.retry.attempts``, ``sinks.crm.secrets[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in path).removeprefix(".")


def _key(name: str) -> str:
    shown = name if len(name) <= NAME_CHARS else name[:NAME_CHARS] + "…"
    return shown if _BARE.fullmatch(shown) else json.dumps(shown, ensure_ascii=not shown.isprintable())


def variable(path: Path) -> str:
    """The variable of the environment that stands for ``path``."""
    return PREFIX + "__".join(str(step) for step in path).upper().replace(".", "_")


def meant(name: str, valid: Iterable[str]) -> str:
    """Advice for whoever wrote ``name``: the nearest valid name, else all of them. Upper and lower case are alike."""
    names = {other.lower(): other for other in sorted(valid)}
    if near := get_close_matches(name.lower(), names, 1):
        return f"did you mean {names[near[0]]}?"
    if not names:
        return "there are none"
    shown = list(names.values())
    return "valid: " + ", ".join(shown[:NAMED]) + (", …" if len(shown) > NAMED else "")
