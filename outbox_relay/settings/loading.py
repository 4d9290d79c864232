"""Loading: file, environment and command line become settings, or one error that lists every problem.

Every setting has a variable, ``OUTBOX_RELAY_`` and its path joined by ``__``. A value is text; lists and tables are
JSON. Below ``PRODUCER__`` an underscore means a dot. Names without ``__`` are ignored, except ``OUTBOX_RELAY_ROUTES``:
Kubernetes sets names such as ``OUTBOX_RELAY_PORT``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import as_list, as_table, read_text
from outbox_relay.postgres import dsn as connection_strings
from outbox_relay.settings.addresses import canonical_host
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import (
    PREFIX,
    Origins,
    Problem,
    SettingPath,
    lines_of,
    problems_of,
    suggestion,
)
from outbox_relay.settings.producer import FROM_FILE_ONLY
from outbox_relay.settings.webhook import WebhookSettings
from outbox_relay.sinks.types import forget_refusals

FILE_BYTES = 4 * 1024 * 1024
"""Size limit of the file, in bytes."""
LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("json", "console")
_WAYS = frozenset(("dsn", "dsn_file"))
"""The settings that name the database."""


def load(path: Path | None, environ: Mapping[str, str], dsn: str | None = None) -> Settings:
    """Return the settings of the file at ``path``, with ``environ`` over it, and ``dsn``, the option, over both.

    Without ``path`` the file is that of ``OUTBOX_RELAY_CONFIG``, if any. ``DATABASE_URL`` counts if nothing else names
    the database. Some commands need none, so the lack of one is left to ``settings.database.require_dsn()``. Blocks
    while the file is read. Raises ConfigurationError with a line for each problem: origin and path of the setting, the
    problem, and what is allowed. No line holds a value that may be secret.
    """
    forget_refusals()
    name = str(path) if path is not None else environ.get("OUTBOX_RELAY_CONFIG", "")
    text = _read(name) if name else ""
    file = _parsed(name, text)
    variables = _Variables(environ)
    values = variables()
    given = {path: name for at, name in variables.given.items() for path in _inside(at, values)}
    if "routes" in values:
        file.pop("routes", None)
    database, in_file, by = values.setdefault("database", {}), as_table(file.get("database")), "--dsn"
    if dsn is None and _WAYS.isdisjoint({**database, **in_file}):
        dsn, by = environ.get("DATABASE_URL"), "DATABASE_URL"
    if dsn is not None:
        database.pop("dsn_file", None)
        database["dsn"] = dsn
        given.pop(("database", "dsn_file"), None)
        given["database", "dsn"] = by
    if not _WAYS.isdisjoint(database):
        for way in _WAYS:
            in_file.pop(way, None)
    origins = Origins(name, lines_of(text), given)
    problems = [*variables.refused(values)]
    try:
        sources = (InitSettingsSource(Settings, values), InitSettingsSource(Settings, file))
        settings = Settings.model_validate({"sources": sources})
    except ValidationError as error:
        problems += problems_of(error, Settings)
    else:
        settings.remember(origins)
        problems += _conflicts(settings, environ)
        if not problems:
            return settings
    raise ConfigurationError("\n".join(dict.fromkeys(origins.at(each.path, each.text) for each in problems)))


class _Variables(EnvSettingsSource):
    """The settings in environment variables. ``given`` has the variable by the path that it sets."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {
            name: text
            for name, text in environ.items()
            if name.startswith(PREFIX) and ("__" in name.removeprefix(PREFIX) or name == "OUTBOX_RELAY_ROUTES")
        }
        super().__init__(Settings)
        self.given: dict[SettingPath, str] = {_path(name): name for name in sorted(self._environ)}

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): text for name, text in self._environ.items()}

    def __call__(self) -> dict[str, Any]:
        """Return the tables."""
        found = super().__call__()
        for sink in map(as_table, as_table(found.get("sinks")).values()):
            if producer := as_table(sink.get("producer")):
                sink["producer"] = {name.replace("_", "."): each for name, each in producer.items()}
        return found

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:  # noqa: ARG002
        """Return the list or table that ``value`` holds as JSON, or the text itself for the model to judge."""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return found if as_table(found) is found or as_list(found) is found else value

    def refused(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the variables whose tables do not exist, and settings in ``values`` that only the file may have."""
        for path in self.given:
            if path[0] not in Settings.model_fields:
                yield Problem(path, f"there is no such setting; {suggestion(str(path[0]), Settings.model_fields)}")
        for sink, table in as_table(values.get("sinks")).items():
            for name in FROM_FILE_ONLY & as_table(as_table(table).get("producer")).keys():
                text = "makes the relay run code: it is taken from the file only, not from the environment"
                yield Problem(("sinks", sink, "producer", name), text)


def _path(name: str) -> SettingPath:
    steps = name.removeprefix(PREFIX).lower().split("__")
    if steps[0] == "sinks" and steps[2:3] == ["producer"]:
        steps[3:] = [step.replace("_", ".") for step in steps[3:]]
    return tuple(steps)


def _inside(path: SettingPath, values: Any) -> Iterator[SettingPath]:
    """Yield ``path``, and those of the settings in its table."""
    yield path
    for step in path:
        values = as_table(values).get(str(step))
    for name, inner in as_table(values).items():
        yield from ((*path, *each) for each in _inside((name,), {name: inner}))


def _conflicts(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a receiver of notices that is no sink, and webhooks whose URL leads to the relay's own services.

    Those are the database, behind a pooler too if ``listen_dsn`` is set, and the HTTP port. ``environ`` has what a
    connection string leaves out. Names are resolved, and judged again, at each connection.
    """
    if (receiver := settings.notify.sink) is not None and receiver not in settings.sinks:
        yield Problem(("notify", "sink"), f"there is no such sink; {suggestion(receiver, settings.sinks)}")
    texts = (settings.database.dsn_text, settings.database.listen_dsn)
    endpoints = chain(*(connection_strings.endpoints(text.get_secret_value(), environ) for text in texts if text))
    own = {(canonical_host(host), port): "database" for host, port in endpoints}
    if settings.http.address is not None:
        host, port = settings.http.address
        own[canonical_host(host), port] = "HTTP port"
    for name, sink in settings.sinks.items():
        if isinstance(sink, WebhookSettings):
            url = urlsplit(sink.url)
            port = url.port or (443 if url.scheme == "https" else 80)
            if (service := own.get((canonical_host(url.hostname or ""), port))) is not None:
                yield Problem(("sinks", name, "url"), f"leads to the relay's own {service}: name another host or port")


def _read(name: str) -> str:
    try:
        return read_text(Path(name), FILE_BYTES)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}; name the file with -c or OUTBOX_RELAY_CONFIG") from None


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", where)
        number = line[1] if line else text.rstrip().count("\n") + 1
        advice = " (a string needs quotes)" if what == "Invalid value" else ""
        what = what.partition(" (")[0].partition(" '")[0]  # which may repeat a value
        raise ConfigurationError(f"{name}:{number}: not valid TOML: {what}{advice}") from None
    except RecursionError:
        raise ConfigurationError(f"{name}: is nested too deeply") from None
    except ValueError:
        raise ConfigurationError(f"{name}: holds a number with too many digits") from None


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
    default = "console" if terminal else "json"
    try:
        return _choice(environ, "OUTBOX_RELAY_LOG_FORMAT", FORMATS, default)
    except ConfigurationError:
        return default


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = environ.get(name, "").strip().lower() or default
    if value not in choices:
        raise ConfigurationError(f"{name}: should be one of {', '.join(choices)}")
    return value
