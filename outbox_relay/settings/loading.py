"""Loading: file, environment and command line become settings, or one error that lists whatever is wrong."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.settings import environment, raw
from outbox_relay.settings.addresses import opens
from outbox_relay.settings.model import Settings
from outbox_relay.settings.own import own_problems
from outbox_relay.settings.places import Sources, lines_of
from outbox_relay.settings.problems import Path as Place
from outbox_relay.settings.problems import Problem, Wrong, meant
from outbox_relay.settings.shape import members
from outbox_relay.settings.sinks import SINKS
from outbox_relay.settings.webhook import WebhookSettings

FILE_BYTES = 4 * 1024 * 1024
"""Largest file of settings, in bytes."""

_ALTERNATIVES = (("dsn", "dsn_file"), ("secrets", "secrets_file"))
_TOML_LINE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


def load(path: Path | None, environ: Mapping[str, str], dsn: str | None = None) -> Settings:
    """The settings of the file at ``path``, with ``environ`` over it, and ``dsn`` (the option ``--dsn``) over both.

    Without ``path`` the file is that of ``OUTBOX_RELAY_CONFIG``; without that too there is none. Whether a database is
    named is not checked here but by ``settings.database.require_dsn()``: some commands need none.

    Blocks for as long as reading the file takes. Raises Misconfigured when the file cannot be read or anything is
    wrong: one line for each problem, with its file and line, variable or option, its place, what is wrong and what is
    allowed. No value that may be secret stands in it.
    """
    named = str(path) if path is not None else environ.get("OUTBOX_RELAY_CONFIG", "")
    text = _read(named) if named else ""
    values = _parse(named, text)
    given = environment.read(environ, values)
    if dsn is not None:
        _replace_dsn(given, dsn)
    sources = Sources(named, lines_of(text), given.given)
    values = _without_replaced(values, given)
    problems = list(_problems_of_routes(values, given.values))
    try:
        settings = Settings.layered(given.values, values)
    except ValidationError as error:
        problems += _problems(error)
        settings = None
    else:
        problems += own_problems(settings, environ)
    if settings is None or problems or given.problems:
        problems.sort(key=lambda problem: sources.line(problem.path))
        lines = [*given.problems, *(sources.at(problem.path, problem.text) for problem in problems)]
        raise Misconfigured("\n".join(dict.fromkeys(lines)))
    settings.remember(sources)
    return settings


def warnings(settings: Settings) -> list[str]:
    """What is allowed but probably not meant, a line each with its place.

    Sinks without a route, networks that are too wide, secrets that all come to an end.
    """
    found: list[str] = []
    if not settings.sinks:
        found.append(settings.at((), "there is no sink: nothing will be delivered"))
    for name, sink in settings.sinks.items():
        if name not in settings.routes.sinks:
            found.append(settings.at(("sinks", name), "no route leads to this sink; add it to a list in [routes]"))
        if isinstance(sink, WebhookSettings):
            found += (settings.at(("sinks", name, *problem.path), problem.text) for problem in _doubts(sink))
    return found


def _doubts(sink: WebhookSettings) -> Iterator[Problem]:
    for n, network in enumerate(sink.allow_networks):
        if kinds := opens(network):
            said = f"{network} allows {', '.join(kinds)} addresses too; list only the networks that are needed"
            yield Problem(("allow_networks", n), said)
    ends = [secret.until for secret in sink.secrets if secret.until is not None]
    if ends and len(ends) == len(sink.secrets):
        said = f"every secret has an end: from {max(ends).isoformat()} on nothing is sent; add one without"
        yield Problem(("secrets",), said)


def _read(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            content = file.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise Misconfigured(f"{name}: is larger than {FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise Misconfigured(f"{name}: {error.strerror}; name the file with -c or OUTBOX_RELAY_CONFIG") from None
    except ValueError:
        raise Misconfigured(f"{name}: is not a text file in UTF-8") from None


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(_toml_problem(name, text, str(error))) from None
    except RecursionError:
        raise Misconfigured(f"{name}: is nested too deeply") from None
    except ValueError:
        raise Misconfigured(f"{name}: holds a number with too many digits") from None


def _toml_problem(name: str, text: str, said: str) -> str:
    """A line for what the parser says, which repeats no value; two tables of one name in plain words."""
    found = _TOML_LINE.search(said)
    number = int(found[1]) if found and found[1] else text.rstrip().count("\n") + 1
    where, what = f"{name}:{number}", _TOML_LINE.sub("", said)
    header = text.split("\n")[number - 1].partition("#")[0].strip()
    if what.startswith("Cannot declare"):
        hint = "; each sink needs a name of its own" if header.startswith("[sinks.") else ""
        return f"{where}: the table {header} stands twice{hint}"
    if what.startswith("Cannot overwrite"):
        return f"{where}: a name stands twice in one table"
    if what.startswith("Cannot mutate"):
        return f"{where}: the table is already complete and cannot be added to"
    advice = " (a string stands in quotes)" if what.startswith("Invalid value") else ""
    return f"{where}: no valid TOML: {what}{advice}"


def _replace_dsn(given: environment.Environment, dsn: str) -> None:
    table = raw.table(given.values.get("database")) or {}
    for name in ("dsn", "dsn_file"):
        table.pop(name, None)
    given.put(("database", "dsn"), "--dsn", dsn)


def _without_replaced(values: dict[str, Any], given: environment.Environment) -> dict[str, Any]:
    """The file's ``values`` without those that the environment gives, and without the alternatives to these."""
    kept = copy.deepcopy(values)
    for path in given.given:
        others = next((pair for pair in _ALTERNATIVES if path[-1] in pair), (path[-1],))
        table = kept
        for step in path[:-1]:
            table = raw.table(table.get(str(step))) or {}
        for name in others:
            table.pop(str(name), None)
    return kept


def _problems_of_routes(*layers: Mapping[str, Any]) -> Iterator[Problem]:
    """Sinks that stand in a route and nowhere else, by the raw values, so that other problems do not hide these."""
    known = {str(name) for layer in layers for name in raw.table(layer.get("sinks")) or {}}
    for layer in layers:
        for pattern, sinks in (raw.table(layer.get("routes")) or {}).items():
            for n, name in enumerate(raw.items(sinks) or ()):
                if isinstance(name, str) and name not in known:
                    shown = name if name.isprintable() and len(name) <= 40 else "this name"
                    yield Problem(("routes", pattern, n), f"there is no sink {shown}; {meant(name, known)}")


def _problems(error: ValidationError) -> Iterator[Problem]:
    """The problems in ``error``, without the values that they are about."""
    for details in error.errors(include_input=False, include_url=False):
        path, kinds = _place(details["loc"])
        raised = details.get("ctx", {}).get("error")
        if isinstance(raised, Wrong):
            around = path[:-1] if raised.beside else path
            yield from (Problem((*around, *problem.path), problem.text) for problem in raised.problems)
        else:
            yield _problem(details, path, kinds)


def _place(loc: Place) -> tuple[Place, dict[str, str]]:
    """The path in the file of a place in the models, and the kind of the sink in it."""
    path = tuple(step for step in loc if step != "[key]")
    if path[:1] == ("sinks",) and len(path) > 2:
        return (*path[:2], *path[3:]), {str(path[1]): str(path[2])}
    return path, {}


def _problem(details: ErrorDetails, path: Place, kinds: Mapping[str, str]) -> Problem:
    match details["type"]:
        case "extra_forbidden":
            return Problem(path, f"there is no such setting; {meant(str(path[-1]), members(path[:-1], kinds))}")
        case "missing":
            return Problem(path, f"is required{_meaning(path, kinds)}")
        case "union_tag_not_found":
            return Problem((*path, "type"), f"is required: {_kinds_of_sinks()}")
        case "union_tag_invalid":
            tag = str(details.get("ctx", {}).get("tag", ""))
            return Problem((*path, "type"), f"should be {_kinds_of_sinks()}; {meant(tag, SINKS)}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(path, "should be a table")
        case "value_error":
            return Problem(path, details["msg"].removeprefix("Value error, "))
        case _:
            return Problem(path, f"{_plain(details['msg'])}{_meaning(path, kinds)}")


def _plain(message: str) -> str:
    for technical in ("Input ", "String ", "Tuple ", "Dictionary "):
        message = message.removeprefix(technical)
    return message[:1].lower() + message[1:]


def _kinds_of_sinks() -> str:
    return " or ".join(f'"{kind}"' for kind in SINKS)


def _meaning(path: Place, kinds: Mapping[str, str]) -> str:
    """What the setting at ``path`` is, as its model says."""
    names = [step for step in path if isinstance(step, str)]
    field = members(names[:-1], kinds).get(names[-1]) if names else None
    description = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".") if field else ""
    return f" ({description[:1].lower()}{description[1:]})" if description else ""
