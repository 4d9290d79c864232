"""The sources of the settings: the file, and the environment variables over it. Also the variables of the log.

Every setting has a variable, ``OUTBOX_RELAY_`` and its path joined by ``__``. A value is text; lists and tables are
JSON, and replace what the file says. A list of strings may also be one plain string. Below ``PRODUCER__`` and
``PRODUCER_FILES__`` an underscore means a dot. Names without ``__`` are ignored, except ``OUTBOX_RELAY_ROUTES`` and
those that lack no more than an underscore: Kubernetes sets names such as ``OUTBOX_RELAY_PORT``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Union, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import as_table, fields, read_text, table
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import PREFIX, Problem, SettingPath, lines_of, variable
from outbox_relay.settings.producer import PROPERTIES, refused_from_environment
from outbox_relay.settings.schedules import ScheduleSettings
from outbox_relay.settings.sink_tables import known_type
from outbox_relay.sinks.types import BUILTIN

FILE_BYTES = 4 * 1024 * 1024
"""Size limit of the file, in bytes."""

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("json", "console")

FOUND_FIELDS = 4096
"""Maximum number of fields whose place is remembered."""

_DELIMITER = "\x1f"
_SOURCES_OF_DSN = (("database", "dsn"), ("database", "dsn_file"))
_ALTERNATIVES = {"dsn": "dsn_file", "dsn_file": "dsn", "secrets": "secrets_file", "secrets_file": "secrets"}

_found: dict[tuple[int, str, bool | None], tuple[Any, FieldInfo | None]] = {}
"""Results of ``EnvironmentSource.next_field``, with the field that was asked for: so its id stays its own."""


class EnvironmentSource(EnvSettingsSource):
    """The settings in ``environ``, and ``dsn``, the option ``--dsn``, over them; ``file`` has names and types of sinks.

    ``given`` has the name of the variable or option by the path that it sets. ``misspelt`` has the right name by that
    of a variable with an underscore too few or too many.
    """

    def __init__(self, environ: Mapping[str, str], dsn: str | None, file: FileSource) -> None:
        super().__init__(Settings, case_sensitive=True, env_prefix="", env_nested_delimiter=_DELIMITER)
        self._environ = environ
        named = {_path(name): name for name in sorted(environ) if _is_variable(name)}
        types = {path[1]: environ[name] for path, name in named.items() if path[0] == "sinks" and path[2:] == ("type",)}
        self._models = _models_by_sink({**file.types(), **types})
        tables = {path[:2] for path in (*file.lines, *named) if path[2:] in (("type",), ("cron",))}
        plugins = frozenset((("sinks", name), model) for name, model in self._models.items())
        self.misspelt = _misspelt(environ, tables, plugins)
        named = {path: name for path, name in named.items() if name not in self.misspelt}
        if dsn is not None:
            others = {path: name for path, name in named.items() if path not in _SOURCES_OF_DSN}
            named = {**others, _SOURCES_OF_DSN[0]: "--dsn"}
        # Deeper variables are applied after the JSON of the tables around them.
        self.given: dict[SettingPath, str] = dict(sorted(named.items(), key=lambda item: len(item[0])))
        texts = {path: environ.get(name, dsn) for path, name in self.given.items() if _refusal(path) is None}
        self.env_vars = {_DELIMITER.join(map(str, path)): text for path, text in texts.items()}

    def __call__(self) -> dict[str, Any]:
        """Return the tables; an unknown one is empty."""
        return self._tables

    @cached_property
    def _tables(self) -> dict[str, Any]:
        unknown = {str(path[0]): dict[str, Any]() for path in self.given if path[0] not in Settings.model_fields}
        return {**super().__call__(), **unknown}

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:  # noqa: ARG002 - the base's
        """Return the list or table that ``value`` holds as JSON, or the text itself for the model to refuse."""
        if field and get_origin(field.annotation) is tuple and not value.lstrip().startswith("["):
            return [value]
        try:
            return _parsed_json(value)
        except ValueError:
            return value

    def next_field(self, field: Any, key: str, case_sensitive: bool | None = None) -> FieldInfo | None:
        """Return the field ``key`` of the model in ``field``, or None. The base walks through all fields each time.

        The table of a sink has the model of its type, or any of the relay's own if its type is not known.
        """
        if field is Settings.model_fields["sinks"]:
            model: Any = self._models.get(key) or Union[tuple(_own_models())]  # noqa: UP007 - made of a list
            return model
        place = (id(field), key, case_sensitive)
        if place not in _found:
            found = super().next_field(field, key, case_sensitive)
            if len(_found) >= FOUND_FIELDS:
                return found
            _found[place] = (field, found)
        return _found[place][1]

    def json_fault(self, path: SettingPath, wanted: str) -> str:
        """Return why the variable that sets ``path`` is not the JSON that is ``wanted``."""
        try:
            _parsed_json(self._environ[self.given[path]])
        except ValueError as error:
            return f"should be {wanted}: {error}"
        return f"should be {wanted}"

    def problems(self) -> Iterator[Problem]:
        """Yield paths that variables cannot set, and settings that are taken from the file only."""
        yield from (Problem(path, reason) for path in self.given if (reason := _refusal(path)) is not None)
        for sink, settings in as_table(self._tables.get("sinks")).items():
            for name in ("producer", "producer_files"):
                for key, value in as_table(as_table(settings).get(name)).items():
                    if reason := refused_from_environment(key, value):
                        yield Problem(("sinks", sink, name, key), reason)


class FileSource(InitSettingsSource):
    """The settings in the TOML file ``name``; an empty name means no file.

    Unlike pydantic-settings' source for TOML it knows the lines, reads pipes too, and refuses a file that is missing.
    """

    def __init__(self, name: str) -> None:
        text = _read(name) if name else ""
        self._values = _parsed_toml(name, text)
        super().__init__(Settings, self._values)
        self.lines = lines_of(text)

    def types(self) -> dict[str | int, str]:
        """Return the types of the sinks by their names."""
        kinds = {name: as_table(table).get("type") for name, table in as_table(self._values.get("sinks")).items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, str)}

    def discard(self, replaced: Iterable[SettingPath]) -> None:
        """Remove the settings that are ``replaced`` by another source, and the alternatives to these."""
        for path in replaced:
            around = self._values
            for step in path[:-1]:
                around = as_table(around.get(str(step)))
            around.pop(str(path[-1]), None)
            around.pop(_ALTERNATIVES.get(str(path[-1]), ""), None)
        self.init_kwargs = self._values


def _is_variable(name: str) -> bool:
    return name.startswith(PREFIX) and ("__" in name.removeprefix(PREFIX) or name == "OUTBOX_RELAY_ROUTES")


def _path(name: str) -> SettingPath:
    """Return the path that a variable sets. A sink's name may end with an underscore."""
    steps = re.split("__(?!_)", name.removeprefix(PREFIX).lower())
    if len(steps) == 4 and steps[0] == "sinks" and steps[2] in ("producer", "producer_files"):
        steps[3] = steps[3].replace("_", ".")
    return tuple(steps)


def _refusal(path: SettingPath) -> str | None:
    """Return why no variable sets ``path`` although a table around it takes any name, or None."""
    match path:
        case ("routes", _, *_) | ("sinks", _, "headers", _, *_) | ("schedules", _, "payload" | "headers", _, *_):
            whole = path[: 1 if path[0] == "routes" else 3]
            return f"{whole[-1]} have no variables of their own; {variable(whole)} holds the whole table as JSON"
        case ("sinks", _, "producer" | "producer_files", _, _, *_):
            right = variable((*path[:3], "_".join(map(str, path[3:]))))
            return f"there is no such setting; did you mean {right}?"
        case _:
            return None


def _own_models() -> list[type[BaseModel]]:
    return [found.settings for kind in BUILTIN if (found := known_type(kind)) is not None]


def _models_by_sink(types: Mapping[str | int, str]) -> dict[str | int, type[BaseModel]]:
    """Return the models of sinks, by their names, whose types are known and can be used."""
    return {name: found.settings for name, kind in types.items() if (found := known_type(kind)) is not None}


_Models: TypeAlias = frozenset[tuple[SettingPath, type[BaseModel]]]


def _misspelt(environ: Iterable[str], tables: Iterable[SettingPath], models: _Models) -> dict[str, str]:
    valid, right = _valid_variables(frozenset(tables), models)
    near = {name: right.get(name.replace("__", "_")) for name in sorted(environ) if name not in valid}
    return {name: found for name, found in near.items() if found is not None}


@lru_cache(maxsize=8)
def _valid_variables(tables: frozenset[SettingPath], models: _Models) -> tuple[set[str], dict[str, str]]:
    """Return the variables of all settings, and each of them by its name with single underscores."""
    valid = {variable(path) for path in _settings(tables, models)}
    return valid, {name.replace("__", "_"): name for name in sorted(valid)}


def _settings(tables: Iterable[SettingPath], models: _Models) -> Iterator[SettingPath]:
    """Yield the paths of all settings and tables; those of the sinks in ``tables`` as if they had any type.

    Sinks have their own type too, which may come from a plug-in.
    """
    yield from _paths(Settings)
    for table_path in tables:
        kind = table_path[0]
        for model in _own_models() if kind == "sinks" else [ScheduleSettings] if kind == "schedules" else []:
            yield from ((*table_path, *path) for path in _paths(model))
        if kind == "sinks":
            yield from ((*table_path, "producer", name) for name in PROPERTIES)
    for table_path, model in models:
        yield from ((*table_path, *path) for path in _paths(model))


@cache
def _paths(model: type[BaseModel]) -> tuple[SettingPath, ...]:
    """Return the paths of the settings and tables of ``model``."""
    found: list[SettingPath] = []
    for name, field in fields(model).items():
        inner = table(field)
        found += [(name,), *((name, *path) for path in (_paths(inner) if inner else ()))]
    return tuple(found)


def _parsed_json(text: str) -> Any:
    """Return the value of ``text``. Raises ValueError without the text."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object in it has the same name twice")
    return found


def _read(name: str) -> str:
    try:
        return read_text(Path(name), FILE_BYTES)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}; name the file with -c or OUTBOX_RELAY_CONFIG") from None


def _parsed_toml(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(_toml_fault(name, text, str(error))) from None
    except RecursionError:
        raise ConfigurationError(f"{name}: is nested too deeply") from None
    except ValueError:
        raise ConfigurationError(f"{name}: holds a number with too many digits") from None


def _toml_fault(name: str, text: str, said: str) -> str:
    """Return a line for what the parser ``said``, which repeats no value; two tables of one name in plain words."""
    what, _, where = said.partition(" (at ")
    found = re.match(r"line (\d+)", where)
    number = int(found[1]) if found else text.rstrip().count("\n") + 1
    header = text.split("\n")[number - 1].partition("#")[0].strip()
    advice = "; each sink needs a name of its own" if header.startswith("[sinks.") else ""
    plain = {
        "Cannot declare": f"the table {header} appears twice{advice}",
        "Cannot overwrite": "a name appears twice in one table",
        "Cannot mutate": "the table is already complete and cannot be added to",
        "Invalid value": "not valid TOML: Invalid value (a string needs quotes)",
    }
    return f"{name}:{number}: {plain.get(' '.join(what.split()[:2]), f'not valid TOML: {what}')}"


class LogSettings(NamedTuple):
    """Level and format of the log."""

    level: str
    format: str


def log_settings(environ: Mapping[str, str], *, terminal: bool) -> LogSettings:
    """Return level and format of the log, from ``OUTBOX_RELAY_LOG_LEVEL`` and ``OUTBOX_RELAY_LOG_FORMAT``.

    The defaults are info, and json unless stderr is a ``terminal``. Case and blanks are ignored. Raises
    ConfigurationError if a value is not among the known ones.
    """
    return LogSettings(
        _choice(environ, "OUTBOX_RELAY_LOG_LEVEL", LEVELS, "info"),
        _choice(environ, "OUTBOX_RELAY_LOG_FORMAT", FORMATS, "console" if terminal else "json"),
    )


def log_format(environ: Mapping[str, str], *, terminal: bool) -> str:
    """Return the format of the log, or the default if the variable has none of the known ones."""
    try:
        return log_settings({**environ, "OUTBOX_RELAY_LOG_LEVEL": ""}, terminal=terminal).format
    except ConfigurationError:
        return log_settings({}, terminal=terminal).format


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in choices:
        raise ConfigurationError(f"{name}: should be one of {', '.join(choices)}")
    return value
