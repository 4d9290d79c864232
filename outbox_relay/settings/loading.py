"""Loading: file, environment and command line become settings, or one error that lists every problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import fields
from outbox_relay.postgres import dsn as connection_strings
from outbox_relay.settings.addresses import canonical_host
from outbox_relay.settings.meanings import meaning
from outbox_relay.settings.model import Settings
from outbox_relay.settings.problems import InvalidSetting, Origins, Problem, SettingPath, suggestion, variable
from outbox_relay.settings.schedules import ScheduleSettings
from outbox_relay.settings.sink_tables import BUILTIN_TYPES, InvalidTable, known_type, type_fault
from outbox_relay.settings.sources import EnvironmentSource, FileSource
from outbox_relay.settings.webhook import WebhookSettings
from outbox_relay.sinks.types import forget_refusals


def load(path: Path | None, environ: Mapping[str, str], dsn: str | None = None) -> Settings:
    """Return the settings of the file at ``path``, with ``environ`` over it, and ``dsn``, the option, over both.

    Without ``path`` the file is that of ``OUTBOX_RELAY_CONFIG``, if any. Some commands need no database, so the lack of
    one is left to ``settings.database.require_dsn()``. Blocks while the file is read. Raises ConfigurationError with a
    line for each problem: origin and path of the setting, the problem, and what is allowed. No line holds a value that
    may be secret.
    """
    forget_refusals()
    name = str(path) if path is not None else environ.get("OUTBOX_RELAY_CONFIG", "")
    file = FileSource(name)
    environment = EnvironmentSource(environ, dsn, file)
    file.discard(environment.given)
    origins = Origins(name, file.lines, environment.given)
    problems = [*environment.problems()]
    settings = None
    try:
        settings = Settings.model_validate({"sources": (environment, file)})
    except ValidationError as error:
        for details in error.errors(include_input=False, include_url=False):
            problems += _problems(details, environment, origins)
    else:
        problems += _own_problems(settings, environ)
    problems.sort(key=lambda problem: origins.line(problem.path))
    misspelt = environment.misspelt.items()
    lines = [f"{name}: there is no such variable; did you mean {right}?" for name, right in misspelt]
    lines += (origins.at(problem.path, problem.text) for problem in problems)
    if lines or settings is None:
        raise ConfigurationError("\n".join(dict.fromkeys(lines)))
    settings.remember(origins)
    return settings


def _problems(details: ErrorDetails, environment: EnvironmentSource, origins: Origins) -> Iterator[Problem]:
    """Yield the problems that pydantic reports in ``details``, without the values that they are about."""
    loc = tuple(step for step in details["loc"] if step != "[key]")
    path = (*loc[:2], *loc[3:]) if loc[0] == "sinks" else loc
    raised = details.get("ctx", {}).get("error")
    if isinstance(raised, InvalidTable):
        for inner in raised.errors:
            yield from _problems({**inner, "loc": (*loc, raised.kind, *inner["loc"])}, environment, origins)
    elif isinstance(raised, InvalidSetting):
        around = path[:-1] if raised.in_table else path
        yield from (Problem((*around, *each.path), each.text) for each in raised.problems)
    elif path in origins.given and details["type"] in _JSON:
        yield Problem(path, environment.json_fault(path, _JSON[details["type"]]))
    elif details["type"].startswith("union_tag"):
        yield Problem((*path, "type"), _kind_fault(details, path, origins))
    elif details["type"] == "extra_forbidden":
        by_variable = any(given[: len(path)] == path for given in origins.given)
        table = _table(loc[:-1])
        known = fields(table) if table else ()
        nearest = suggestion(str(path[-1]), known, lambda name: variable((*path[:-1], name)) if by_variable else name)
        yield Problem(path, f"there is no such setting; {nearest}")
    else:
        yield Problem(path, _text(details, loc))


_TABLE = 'a JSON object, such as {"NAME": …}'
_JSON = {"model_type": _TABLE, "model_attributes_type": _TABLE, "dict_type": _TABLE, "tuple_type": "a JSON list"}
"""The JSON of a variable that sets a whole list or table, by pydantic's type of the error."""


def _kind_fault(details: ErrorDetails, path: SettingPath, origins: Origins) -> str:
    if details["type"] == "union_tag_invalid":
        return type_fault(str(details.get("ctx", {}).get("tag")))
    if path in origins.lines or path in origins.given:
        return f"is required: {BUILTIN_TYPES}"
    known = {str(at[1]) for at in (*origins.lines, *origins.given) if at[0] == "sinks" and at[2:] == ("type",)}
    absent = f"there is no sink {path[1]}, and no {variable((*path, 'type'))}"
    return f"{absent}; {suggestion(str(path[1]), known)}"


def _text(details: ErrorDetails, loc: SettingPath) -> str:
    """Return pydantic's message in the words of TOML, with the meaning of the setting."""
    match details["type"]:
        case "model_type" | "model_attributes_type":
            return "should be a table"
        case "value_error":
            return details["msg"].removeprefix("Value error, ")
        case "missing":
            text = "is required"
        case _:
            text = details["msg"].replace("valid dictionary", "table").replace("valid tuple", 'list: ["…", …]')
            for subject in ("Input ", "String ", "Tuple ", "Dictionary "):
                text = text.removeprefix(subject)
    last = max(n for n, step in enumerate(loc) if isinstance(step, str))
    table = _table(loc[:last])
    about = meaning(table, str(loc[last])) if table else ""
    return f"{text} ({about[:1].lower()}{about[1:]})" if about else text


def _table(loc: SettingPath) -> type[BaseModel] | None:
    """Return the model of the table at pydantic's ``loc``, or None if any name is allowed there."""
    found: type[BaseModel] | None = Settings
    if loc[:1] == ("sinks",):
        kind = known_type(loc[2]) if len(loc) > 2 else None
        found, loc = kind.settings if kind else None, loc[3:]
    if loc[:1] == ("schedules",):
        found, loc = ScheduleSettings if len(loc) > 1 else None, loc[2:]
    for step in loc:
        if isinstance(step, str):
            field = fields(found).get(step) if found else None
            annotation = field.annotation if field else None
            models = (each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
            found = next((each for each in models if issubclass(each, BaseModel)), None)
    return found


def _own_problems(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a receiver of notices that is no sink, and webhooks whose URL leads to the relay's own services.

    Those are the database, behind a pooler too if ``listen_dsn`` is set, and the HTTP port.

    ``environ`` has what a connection string leaves out. Names are resolved, and judged again, at each connection.
    """
    if (receiver := settings.notify.sink) is not None and receiver not in settings.sinks:
        known = suggestion(receiver, settings.sinks)
        yield Problem(("notify", "sink"), f"there is no such sink; {known}")
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
