"""Problems of a configuration: where a setting was given, and the words for it. No value of a setting appears here."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from outbox_relay.fields import as_list, as_table

SettingPath: TypeAlias = tuple[str | int, ...]
"""The place of a setting: names of tables and keys, numbers of list items from 0."""

PREFIX = "OUTBOX_RELAY_"
"""Prefix of all environment variables of the relay."""
NAMED = 12
"""Most valid names listed in a message."""
NAME_CHARS = 80
"""Most characters of a name that a message repeats."""
STATEMENT_LINES = 500
"""Longest value, in lines, after which lines are still found: each line of a value means parsing it again."""


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


@dataclass(frozen=True, slots=True)
class Origins:
    """The origin of each setting: ``lines`` of the ``file``, and in ``given`` the name of a variable or an option."""

    file: str = ""
    lines: Mapping[SettingPath, int] = field(default_factory=dict[SettingPath, int])
    given: Mapping[SettingPath, str] = field(default_factory=dict[SettingPath, str])

    def where(self, path: SettingPath) -> str:
        """Return where ``path`` or the nearest table around it was given: file and line, variable or option."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        if name := next((self.given[at] for at in around if at in self.given), None):
            return name
        for at in around:
            if line := self.lines.get(at):
                return f"{self.file}:{line}"
            if inside := [name for given, name in self.given.items() if given[: len(at)] == at]:
                return inside[0] if len(inside) == 1 else f"{variable(at)}__…"
        return self.file or "environment"

    def line(self, path: SettingPath) -> int:
        """Return the line of ``path`` or of the nearest table around it, from 1; 0 if the file has neither."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)

    def at(self, path: SettingPath, text: str) -> str:
        """Return a line for people: origin and path of the setting, and ``text`` about it."""
        return f"{self.where(path)}: {f'{dotted(path)}: ' if path else ''}{text}"


def lines_of(text: str) -> dict[SettingPath, int]:
    """Return the line, from 1, at which each table and key of a valid TOML document begins.

    The parser does not tell, so the document is cut into statements, each the fewest lines that parse by themselves.
    """
    found: dict[SettingPath, int] = {}
    header: SettingPath = ()
    counts = Counter[SettingPath]()
    for line, statement in _statements(text):
        paths = list(_paths(tomllib.loads(statement)))
        if not statement.lstrip().startswith("["):
            paths = [header + path for path in paths]
        elif statement.lstrip().startswith("[["):
            *_, array, _ = paths
            header = paths[-1] = (*array, counts[array])
            counts[array] += 1
        else:
            header = paths[-1]
        for path in paths:
            found.setdefault(path, line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the statements with their first lines, up to one of more than ``STATEMENT_LINES``."""
    lines = text.replace("\r\n", "\n").split("\n")
    start = 0
    for end in range(1, len(lines) + 1):
        if end - start > STATEMENT_LINES:
            return
        statement = "\n".join(lines[start:end])
        try:
            empty = not tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if not empty:
            yield start + 1, statement
        start = end


def _paths(value: object) -> Iterator[SettingPath]:
    """Yield every path in ``value``, tables before their content."""
    for key, inner in (*as_table(value).items(), *enumerate(as_list(value))):
        yield (key,)
        yield from ((key, *path) for path in _paths(inner))
