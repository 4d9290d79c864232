"""The tables ``[schedules.NAME]``: events that relays emit at the times of a cron expression."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BeforeValidator, Field

from outbox_relay.domain.cron import cron_fault, zone_fault
from outbox_relay.domain.routing import RESERVED, TYPE_CHARS
from outbox_relay.fields import Section, as_list, as_table, matching, rule
from outbox_relay.settings.problems import InvalidSetting, Problem, SettingPath

SCHEDULES_MAX = 1000
"""Maximum number of schedules in a file."""
SCHEDULED_FOR = "outbox-scheduled-for"
"""The header with the time of a scheduled event."""
KEY_BYTES = 1024
TENANT_BYTES = 255
HEADERS_BYTES = 16_384 - 100
"""Most bytes of headers as JSON: what the schema takes, less the one that is added."""
DEPTH = 100
"""Deepest nesting of a payload."""
NO_TEXT = "character that JSON in PostgreSQL does not have"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,255}")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

ScheduleName: TypeAlias = Annotated[
    str,
    matching(
        r"(?!.*__)[a-z][a-z0-9_]{0,39}",
        "a schedule's name is 1 to 40 of a-z, 0-9 and _, begins with a letter and holds no __",
    ),
]
"""A name that is part of variables' names, in which ``__`` separates."""


def _type_fault(text: str) -> str | None:
    if not re.fullmatch(rf"[!-)+-~]{{1,{TYPE_CHARS}}}", text):
        return f'should be 1 to {TYPE_CHARS} visible ASCII characters without space and "*"'
    if text.startswith(RESERVED):
        return f'types that begin with "{RESERVED}" are the relay\'s own'
    return None


def _text_fault(text: str | None, most: int) -> str | None:
    if text is None:
        return None
    if not _is_text(text):
        return "holds a character that PostgreSQL cannot store: U+0000, or half of a surrogate pair"
    return f"has more than {most} bytes" if len(text.encode()) > most else None


def _tenant_fault(text: str | None) -> str | None:
    return "is empty: leave it out for an event without a tenant" if text == "" else _text_fault(text, TENANT_BYTES)


def _payload(value: object) -> object:
    """Return a table, or JSON text with an object, as JSON text."""
    table = _object(value)
    if problems := [*_payload_problems((), table)]:
        raise InvalidSetting(problems)
    return json.dumps(table, ensure_ascii=False)


def _headers(value: object) -> object:
    """Return a table of strings, or JSON text with one, as JSON text."""
    headers = _object(value)
    if problems := [Problem((name,), fault) for name in headers if (fault := _header_fault(name, headers[name]))]:
        raise InvalidSetting(problems)
    text = json.dumps(headers, ensure_ascii=False)
    if len(text.encode()) > HEADERS_BYTES:
        raise ValueError(f"should have at most {HEADERS_BYTES} bytes as JSON")
    return text


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if (table := as_table(value)) is not value:
        raise ValueError("should be a table, or a string with a JSON object")
    return table


def _header_fault(name: str, value: object) -> str | None:
    if not _HEADER_NAME.fullmatch(name):
        return "should be the name of a header: 1 to 255 letters, digits and !#$%&'*+-.^_`|~"
    if name.lower() == SCHEDULED_FOR:
        return "is the header in which the relay writes the time"
    if not isinstance(value, str):
        return "should be a string"
    return "holds a control character" if _CONTROLS.search(value) or not _is_text(value) else None


def _payload_problems(path: SettingPath, value: object) -> Iterator[Problem]:
    """Yield a problem for each part of a payload that JSON or PostgreSQL does not know."""
    if len(path) > DEPTH:
        yield Problem(path[:3], f"is nested more than {DEPTH} deep")
    elif fault := _value_fault(value):
        yield Problem(path, fault)
    elif isinstance(value, dict | list):
        parts = as_table(cast("object", value)).items() or enumerate(as_list(cast("object", value)))
        for step, each in parts:
            yield from _payload_problems((*path, step), each)


def _value_fault(value: object) -> str | None:
    match value:
        case None | bool() | int() | list():
            return None
        case float():
            return None if math.isfinite(value) else "JSON has no such number"
        case str():
            return None if _is_text(value) else f"holds a {NO_TEXT}"
        case dict():
            return None if all(map(_is_text, as_table(cast("object", value)))) else f"holds a name with a {NO_TEXT}"
        case _:
            return "JSON has no dates and times: write a string"


def _is_text(text: str) -> bool:
    """Return False for text with U+0000 or half of a surrogate pair."""
    return not re.search(r"[\x00\ud800-\udfff]", text)


class ScheduleSettings(Section):
    """An event that relays emit at the times of a cron expression, once for each time."""

    cron: Annotated[str, rule(lambda text, _: cron_fault(text))]
    """Times, as "MINUTE HOUR DAY MONTH WEEKDAY"; fields take *, lists, ranges, steps, and names such as MON."""
    timezone: Annotated[str, rule(lambda text, _: zone_fault(text))] = "UTC"
    """The time zone of these times, such as "Europe/Berlin"."""
    type: Annotated[str, rule(lambda text, _: _type_fault(text))]
    """The type of the event, 1 to 255 visible ASCII characters without space."""
    payload: Annotated[str, BeforeValidator(_payload)] = Field(default="{}", repr=False)
    """The payload of the event, a table."""
    headers: Annotated[str, BeforeValidator(_headers)] = Field(default="{}", repr=False)
    """Headers of the event, a table of strings."""
    key: Annotated[str | None, rule(lambda text, _: _text_fault(text, KEY_BYTES))] = None
    """The key of the event, at most 1024 bytes; by default it has none."""
    tenant: Annotated[str | None, rule(lambda text, _: _tenant_fault(text))] = None
    """The tenant of the event, 1 to 255 bytes; by default it has none."""
    missed: Literal["one", "skip", "all"] = "one"
    """Times that are late by more than a minute: one event for all of them ("one"), none ("skip"), or "all"."""

    def registration(self, name: str) -> dict[str, Any]:
        """Return what the database registers under ``name``."""
        given = self.model_dump(exclude={"payload", "headers"})
        headers = json.loads(self.headers)
        return {"name": name, **given, "payload": json.loads(self.payload), "headers": headers or None}
