"""Settings from the environment: every one has a twin, ``OUTBOX_RELAY_`` and its path joined by ``__``.

A value is text; lists and tables are JSON, and replace what the file says. A list of strings may also be one plain
string. Below ``PRODUCER__`` and ``PRODUCER_FILES__`` an underscore stands for a dot. Names without ``__`` are ignored,
except those of ``ALONE``: Kubernetes puts names such as ``OUTBOX_RELAY_PORT`` into the environment by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.settings import raw
from outbox_relay.settings.problems import PREFIX, Path, meant, place, variable
from outbox_relay.settings.producer import refused_from_environment
from outbox_relay.settings.shape import Shape, members, shape

ALONE = ("OUTBOX_RELAY_CONFIG", "OUTBOX_RELAY_ROUTES", "OUTBOX_RELAY_LOG_LEVEL", "OUTBOX_RELAY_LOG_FORMAT")
"""The names without ``__`` that mean something."""

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Format: TypeAlias = Literal["json", "console"]

_SEPARATOR = re.compile(r"__(?!_)")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged and how."""

    level: Level
    format: Format


def log_settings(environ: Mapping[str, str], *, terminal: bool) -> LogSettings:
    """Level and format of the log, from ``OUTBOX_RELAY_LOG_LEVEL`` and ``OUTBOX_RELAY_LOG_FORMAT``.

    Without them the level is info, and the format json unless stderr is a ``terminal``. Upper and lower case are alike,
    an empty value is none. Raises Misconfigured when a value is not among the known ones.
    """
    level = _choice(environ, "OUTBOX_RELAY_LOG_LEVEL", get_args(Level), "info")
    shape_of_lines = _choice(environ, "OUTBOX_RELAY_LOG_FORMAT", get_args(Format), "console" if terminal else "json")
    return LogSettings(cast(Level, level), cast(Format, shape_of_lines))


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in choices:
        raise Misconfigured(f"{name}: should be one of {', '.join(choices)}")
    return value


@dataclass(slots=True)
class Environment:
    """What the environment sets: ``values`` in the tables of the file, and ``given``: path → name of the variable."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    given: dict[Path, str] = field(default_factory=dict[Path, str])
    problems: list[str] = field(default_factory=list[str])

    def put(self, path: Path, name: str, value: Any) -> None:
        """Set ``path`` to ``value``, as said by the variable or option ``name``."""
        table = self.values
        for step in path[:-1]:
            inner = raw.table(table.get(str(step)))
            if inner is None:
                inner = table[str(step)] = {}
            table = inner
        table[str(path[-1])] = value
        self.given[path] = name


def read(environ: Mapping[str, str], file: Mapping[str, Any]) -> Environment:
    """The settings in ``environ``. ``file`` is what the file says: it tells the kinds of sinks."""
    found = Environment()
    twins = {name: _path(name) for name in environ if name.startswith(PREFIX) and _is_variable(name)}
    kinds = _kinds(environ, file)
    for name, path in sorted(twins.items(), key=lambda twin: len(twin[1])):
        try:
            found.put(path, name, _value(environ[name], _shape(path, kinds)))
        except ValueError as error:
            found.problems.append(f"{name}: {error}")
    found.problems.extend(_refused(found))
    return found


def _refused(found: Environment) -> Iterator[str]:
    """Yield what stands in the environment and is taken from the file only."""
    for sink, settings in (raw.table(found.values.get("sinks")) or {}).items():
        for table in ("producer", "producer_files"):
            values = raw.table((raw.table(settings) or {}).get(table)) or {}
            for name, reason in refused_from_environment(values).items():
                around = [("sinks", sink, table, name)[:length] for length in (4, 3, 2)]
                where = next((found.given[path] for path in around if path in found.given), "environment")
                yield f"{where}: {place(('sinks', sink, table, name))}: {reason}"


def _shape(path: tuple[str, ...], kinds: Mapping[str, str]) -> Shape:
    """What the setting at ``path`` is. Raises ValueError, with the nearest variable, when there is none."""
    match path:
        case ("routes", _, *_):
            raise ValueError("routes have no variables of their own; OUTBOX_RELAY_ROUTES holds the whole table as JSON")
        case ("sinks", name, *_) if name not in kinds:
            raise ValueError(
                f"there is no sink {name}, and no {variable(('sinks', name, 'type'))}; {meant(name, kinds)}"
            )
        case _:
            found = shape(path, kinds)
    if found is None:
        raise ValueError(f"there is no such setting; {_nearest(path, kinds)}")
    return found


def _is_variable(name: str) -> bool:
    return "__" in name.removeprefix(PREFIX) or name == "OUTBOX_RELAY_ROUTES"


def _path(name: str) -> tuple[str, ...]:
    """The path that a variable stands for."""
    steps = [step.lower() for step in _SEPARATOR.split(name.removeprefix(PREFIX))]
    if len(steps) == 4 and steps[0] == "sinks" and steps[2] in ("producer", "producer_files"):
        steps[3] = steps[3].replace("_", ".")
    return tuple(steps)


def _kinds(environ: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, str]:
    """The kind of each sink that is given at all, by its name; empty when that is not plain."""
    found: dict[str, str] = {}
    for name, sink in (raw.table(file.get("sinks")) or {}).items():
        found[name] = str((raw.table(sink) or {}).get("type", ""))
    for name, value in sorted(environ.items()):
        match _path(name) if name.startswith(PREFIX) else ():
            case ("sinks", sink):
                found[sink] = ""
            case ("sinks", sink, "type"):
                found[sink] = value
            case _:
                pass
    return found


def _nearest(path: tuple[str, ...], kinds: Mapping[str, str]) -> str:
    """Advice for a variable that stands for no setting, by the first of its steps that is wrong."""
    for length in range(1, len(path) + 1):
        if shape(path[:length], kinds) is None:
            names = [variable((*path[: length - 1], name)) for name in members(path[: length - 1], kinds)]
            return meant(variable(path[:length]), names)
    return ""


def _value(text: str, wanted: Shape) -> Any:
    """``text`` as what a setting of that shape takes from the file. Raises ValueError without the text."""
    if wanted == "text":
        return text
    if wanted == "list" and not text.lstrip().startswith("["):
        return [text]
    kind, example = (list, "a JSON list") if wanted == "list" else (dict, 'a JSON object, such as {"NAME": …}')
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"should be {example}: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(f"should be {example}, and is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"should be {example}")  # noqa: TRY004 - one kind of error for whatever is wrong with the text
    return cast(Any, value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a JSON object in it has the same name twice")
    return table
