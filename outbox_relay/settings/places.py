"""Where a setting was given: the line of the file, the variable of the environment, the option of the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outbox_relay.settings import raw
from outbox_relay.settings.problems import Path, place, variable

STATEMENT_LINES = 500
"""Longest value, in lines, behind which lines are still found: each line of a value means parsing it again."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What gave which setting: ``file`` by line, ``given`` by the name of a variable or an option."""

    file: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict[Path, int])
    given: Mapping[Path, str] = field(default_factory=dict[Path, str])

    def where(self, path: Path) -> str:
        """Where ``path``, or else the table around it, was given: a file with its line, a variable, an option."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        if name := next((self.given[at] for at in around if at in self.given), None):
            return name
        for at in around:
            if line := self.lines.get(at):
                return f"{self.file}:{line}"
            if any(inside[: len(at)] == at for inside in self.given):
                return f"{variable(at)}__…"
        return self.file or "environment"

    def line(self, path: Path) -> int:
        """The line of ``path`` or of the table around it, from 1; 0 when it does not stand in the file."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)

    def at(self, path: Path, text: str) -> str:
        """A line for people: where, which setting, and what there is to say of it."""
        shown = f"{place(path)}: " if path else ""
        return f"{self.where(path)}: {shown}{text}"


def lines_of(text: str) -> dict[Path, int]:
    """The line, from 1, at which each table and key of a valid TOML document begins.

    The parser tells no lines, so the document is cut into its statements, each the fewest lines that parse by
    themselves: a header, or a key with its value. What comes after one of more than ``STATEMENT_LINES`` is left out.
    """
    found: dict[Path, int] = {}
    header: Path = ()
    counts: dict[Path, int] = {}
    for line, statement, values in _statements(text):
        if not statement.startswith("["):
            for path in _paths(values):
                found.setdefault(header + path, line)
            continue
        header = _header(values)
        if statement.startswith("[["):
            counts[header] = counts.get(header, -1) + 1
            found.setdefault(header, line)
            header = (*header, counts[header])
        for length in range(1, len(header) + 1):
            found.setdefault(header[:length], line)
    return found


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    lines = text.replace("\r\n", "\n").split("\n")
    start = 0
    for end in range(1, len(lines) + 1):
        if end - start > STATEMENT_LINES:
            return
        statement = "\n".join(lines[start:end])
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if values:
            yield start + 1, statement.lstrip(), values
        start = end


def _header(values: Any) -> Path:
    """The one path in the tables that a header alone makes."""
    entries = raw.items(values)
    if entries is not None:
        return _header(entries[0])
    return next(((key, *_header(inner)) for key, inner in (raw.table(values) or {}).items()), ())


def _paths(values: Any) -> Iterator[Path]:
    """Every path in ``values``, tables before what they hold."""
    entries: Iterable[tuple[str | int, Any]] = (raw.table(values) or {}).items() or enumerate(raw.items(values) or ())
    for key, inner in entries:
        yield (key,)
        for path in _paths(inner):
            yield (key, *path)
