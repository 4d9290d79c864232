"""The tables ``[schedules.NAME]``: events that relays emit at the times of a cron expression."""

from __future__ import annotations

import contextlib
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
DEPTH = 100
"""Deepest nesting of a payload."""
NO_TEXT = "character that JSON in PostgreSQL does not have"

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


def _key_fault(text: str | None) -> str | None:
    if text is None:
        return None
    if not _is_text(text):
        return "holds a character that PostgreSQL cannot store: U+0000, or half of a surrogate pair"
    return f"has more than {KEY_BYTES} bytes" if len(text.encode()) > KEY_BYTES else None


def _payload(value: object) -> object:
    """Return a table as JSON text."""
    if isinstance(value, str):  # that of a variable
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    table = as_table(value)
    if table is not value:
        raise ValueError("should be a table")
    if problems := [*_payload_problems((), table)]:
        raise InvalidSetting(problems)
    return json.dumps(table, ensure_ascii=False)


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


Payload: TypeAlias = Annotated[str, BeforeValidator(_payload, json_schema_input_type=dict[str, Any])]


class ScheduleSettings(Section):
    """An event that relays emit at the times of a cron expression, once for each time."""

    cron: Annotated[str, rule(lambda text, _: cron_fault(text))]
    """Times, as "MINUTE HOUR DAY MONTH WEEKDAY"; fields take *, lists, ranges, steps, and names such as MON."""
    timezone: Annotated[str, rule(lambda text, _: zone_fault(text))] = "UTC"
    """The time zone of these times, such as "Europe/Berlin"."""
    type: Annotated[str, rule(lambda text, _: _type_fault(text))]
    """The type of the event, 1 to 255 visible ASCII characters without space."""
    payload: Payload = Field(default="{}", repr=False)
    """The payload of the event, a table."""
    key: Annotated[str | None, rule(lambda text, _: _key_fault(text))] = None
    """The key of the event, at most 1024 bytes; by default it has none."""
    missed: Literal["one", "skip", "all"] = "one"
    """Times that are late by more than a minute: one event for all of them ("one"), none ("skip"), or "all"."""

    def registration(self, name: str) -> dict[str, Any]:
        """Return what the database registers under ``name``."""
        return {"name": name, **self.model_dump(), "payload": json.loads(self.payload)}
