"""Problems of a configuration: where a setting was given, and the words for it. No value of a setting appears here."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError

from outbox_relay.fields import as_table, names

SettingPath: TypeAlias = tuple[str | int, ...]
"""The place of a setting: names of tables and keys, numbers of list items from 0."""

PREFIX = "OUTBOX_RELAY_"
"""Prefix of all environment variables of the relay."""
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
    """Several problems of one value, raised by a validator; their paths are relative to the value."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problem.text for problem in self.problems))


def problems_of(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """Yield the problems that pydantic reports of a table with ``model``, in the words of TOML and without values."""
    for details in error.errors(include_input=False, include_url=False):
        path = tuple(step for step in details["loc"] if step != "[key]")
        raised = details.get("ctx", {}).get("error")
        if isinstance(raised, InvalidSetting):
            yield from (Problem((*path, *each.path), each.text) for each in raised.problems)
        elif details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            known = _names_at(model, path[:-1])
            yield Problem(path, f"there is no such setting; {suggestion(str(path[-1]), known)}")
        elif details["type"] != "default_factory_not_called":  # another setting is wrong, from which it follows
            yield Problem(path, _text(details["type"], details["msg"]))


def _text(kind: str, message: str) -> str:
    match kind:
        case "model_type" | "model_attributes_type" | "dataclass_type" | "dict_type":
            return "should be a table"
        case "tuple_type":
            return 'should be a list: ["…", …]'
        case "missing" | "missing_argument":
            return "is required"
        case _:
            for subject in ("Value error, ", "Input ", "String ", "Tuple ", "Dictionary "):
                message = message.removeprefix(subject)
            return message


def _names_at(model: type, path: SettingPath) -> Iterable[str]:
    """Return the valid names in the table at ``path``; none if any is allowed there."""
    steps = iter(step for step in path if isinstance(step, str))
    for step in steps:
        annotation = names(model).get(step)
        inner = [annotation, *get_args(annotation), *(each for arg in get_args(annotation) for each in get_args(arg))]
        if get_origin(annotation) is dict:
            next(steps, None)
        found = next((each for each in inner if isinstance(each, type) and names(each)), None)
        if found is None:
            return ()
        model = found
    return names(model)


def dotted(path: SettingPath) -> str:
    """Return ``path`` as TOML writes it: ``sinks.crm.retry.attempts``, ``sinks.crm.secrets[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in path).removeprefix(".")


def _key(name: str) -> str:
    shown = name if len(name) <= NAME_CHARS else name[:NAME_CHARS] + "…"
    return shown if re.fullmatch(r"[A-Za-z0-9_-]+", shown) else json.dumps(shown, ensure_ascii=not shown.isprintable())


def suggestion(name: str, valid: Iterable[str]) -> str:
    """Return the valid name nearest to ``name``, ignoring case, or else a list of them."""
    known = {other.lower(): other for other in sorted(valid)}
    if near := get_close_matches(name.lower(), known, 1):
        return f"did you mean {known[near[0]]}?"
    listed = list(known.values())
    return f"valid: {', '.join(listed[:NAMED])}{', …' if len(listed) > NAMED else ''}" if listed else "there are none"


@dataclass(frozen=True, slots=True)
class Origins:
    """The origin of each setting: ``lines`` of the ``file``, and in ``given`` the name of a variable or an option."""

    file: str = ""
    lines: Mapping[SettingPath, int] = field(default_factory=dict[SettingPath, int])
    given: Mapping[SettingPath, str] = field(default_factory=dict[SettingPath, str])

    def where(self, path: SettingPath) -> str:
        """Return where ``path`` or the nearest table around it was given: file and line, variable or option."""
        for at in (path[:length] for length in range(len(path), 0, -1)):
            if name := self.given.get(at):
                return name
            if line := self.lines.get(at):
                return f"{self.file}:{line}"
            if inside := [name for given, name in self.given.items() if given[: len(at)] == at]:
                return inside[0]
        return self.file or "environment"

    def at(self, path: SettingPath, text: str) -> str:
        """Return a line for people: origin and path of the setting, and ``text`` about it."""
        return f"{self.where(path)}: {f'{dotted(path)}: ' if path else ''}{text}"


def lines_of(text: str) -> dict[SettingPath, int]:
    """Return the line, from 1, at which each table and key of a TOML document begins, as far as a line shows it.

    Parts of values, such as the items of a list, have the line of their key.
    """
    found: dict[SettingPath, int] = {}
    header: SettingPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        is_header = line.lstrip().startswith("[")
        try:
            read = tomllib.loads(line if is_header else f"{line.partition('=')[0]}= 0")
        except tomllib.TOMLDecodeError:
            continue
        path: list[str] = []
        while read:
            step, inner = next(iter(read.items()))
            path.append(step)
            read = as_table(inner)
        header, at = (tuple(path), tuple(path)) if is_header else (header, (*header, *path))
        for length in range(1, len(at) + 1):
            found.setdefault(at[:length], number)
    return found
