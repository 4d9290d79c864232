"""Loading: file, environment and command line become settings, or one error that lists whatever is wrong."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import InitSettingsSource

from outbox_relay.errors import Misconfigured
from outbox_relay.settings import environment
from outbox_relay.settings.addresses import opens
from outbox_relay.settings.model import Settings
from outbox_relay.settings.places import Sources, lines_of
from outbox_relay.settings.problems import Path as Place
from outbox_relay.settings.problems import Problem, Wrong, meant
from outbox_relay.settings.shape import fields, members
from outbox_relay.settings.sinks import SINKS, KafkaSink, WebhookSink

FILE_BYTES = 4 * 1024 * 1024
"""Largest file of settings, in bytes."""

_ALTERNATIVES = (("dsn", "dsn_file"), ("secrets", "secrets_file"))
_TOML_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)$")


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
    problems = [sources.at(at, said) for at, said in _problems_of_routes(values, given.values)]
    try:
        settings = Settings(
            _build_sources=((InitSettingsSource(Settings, given.values), InitSettingsSource(Settings, values)), {})
        )
    except ValidationError as error:
        problems += [sources.at(problem.path, problem.text) for problem in _problems(error)]
        settings = None
    if settings is None or problems or given.problems:
        raise Misconfigured("\n".join(_without_repeats([*given.problems, *problems])))
    settings.remember(sources)
    return settings
