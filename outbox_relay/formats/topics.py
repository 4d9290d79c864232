"""Topic templates: the Kafka topic of an event from its type, key and headers.

``{type}``, ``{key}`` and ``{headers.NAME}`` are fields; other text is literal. A topic name contains no brace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

TOPIC_CHARS = 249
"""Longest topic name in Kafka, in characters."""
INTERNAL_PREFIX = "__"
"""The prefix of Kafka's internal topics, which events are never written to."""
REMEMBERED_TOPICS = 4096
"""Greatest number of topics cached by a template with ``{type}`` as its only field."""

_LEGAL = re.compile(rf"[a-zA-Z0-9._-]{{1,{TOPIC_CHARS}}}")
_ILLEGAL_CHARACTER = re.compile(r"[^a-zA-Z0-9._-]")
_FIELD = re.compile(r"type|key|headers\.[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SHORT_NAME = re.compile(r"[ A-Za-z0-9_.-]{0,60}")
_TOKEN = re.compile(r"\{(?P<field>[^{}]*)\}|[{}]|[^{}]+")
_FIELDS = "fields are {type}, {key} and {headers.NAME}"


@dataclass(frozen=True, slots=True)
class TopicTemplate:
    """A valid template, made by :meth:`parse`. ``parts`` are (True, field) or (False, literal)."""

    text: str
    parts: tuple[tuple[bool, str], ...]
    _by_type: dict[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> TopicTemplate:
        """Return the template in ``text``.

        Raises ValueError if ``text`` is not a template or cannot make a legal topic name. The message names the
        position, counted from 1.
        """
        template = cls(text, tuple(_piece(match) for match in _TOKEN.finditer(text)))
        fixed = "".join(piece for is_field, piece in template.parts if not is_field)
        if not template.fields:
            _check_topic(fixed)
        elif len(fixed) > TOPIC_CHARS:
            raise ValueError(f"makes topic names of more than {TOPIC_CHARS} characters")
        return template

    @property
    def fields(self) -> tuple[str, ...]:
        """The different fields without braces, in order of appearance: ``type``, ``key``, ``headers.NAME``."""
        return tuple(dict.fromkeys(piece for is_field, piece in self.parts if is_field))

    @property
    def start(self) -> str:
        """The literal text before the first field, with which every topic begins."""
        return "".join(piece for _, piece in takewhile(lambda part: not part[0], self.parts))

    @property
    def ambiguous_fields(self) -> tuple[str, str] | None:
        """Two fields whose different values can make the same topic, or None.

        The literal text between two fields may also occur in their values.
        """
        return None if len(self.fields) < 2 else (self.fields[0], self.fields[1])

    def render(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        """Return the topic of an event.

        Raises ValueError, without repeating a value, if the event lacks a field of the template or the result is not a
        legal topic name: 1 to 249 of ``a-z A-Z 0-9 . _ -``, and neither ``.`` nor ``..``.
        """
        if (topic := self._by_type.get(event_type)) is not None:
            return topic
        values = {"type": event_type, "key": key, **{f"headers.{name}": value for name, value in headers.items()}}
        topic = "".join(_value(piece, values.get(piece)) if is_field else piece for is_field, piece in self.parts)
        if not _LEGAL.fullmatch(topic) or topic in (".", ".."):
            _check_topic(topic)
        if self.fields in ((), ("type",)):
            if len(self._by_type) >= REMEMBERED_TOPICS:
                self._by_type.clear()
            self._by_type[event_type] = topic
        return topic


def _piece(match: re.Match[str]) -> tuple[bool, str]:
    token, at, name = match.group(), match.start() + 1, match["field"]
    if name is not None:
        if not _FIELD.fullmatch(name):
            shown = f" {{{name}}}" if _SHORT_NAME.fullmatch(name) else ""
            raise ValueError(f"position {at}: unknown field{shown}; {_FIELDS}")
        return True, name
    if token in ("{", "}"):
        raise ValueError(f"position {at}: a lone {token!r}; {_FIELDS}")
    if illegal := _ILLEGAL_CHARACTER.search(token):
        raise ValueError(f"position {at + illegal.start()}: a topic name cannot contain {illegal.group()!r}")
    return False, token


def _value(field: str, value: str | None) -> str:
    if value is None:
        raise ValueError(f"the topic needs {{{field}}}, which the event does not have")
    if illegal := _ILLEGAL_CHARACTER.search(value):
        raise ValueError(f"{{{field}}} contains {illegal.group()!r}, which is not allowed in a topic name")
    return value


def _check_topic(name: str) -> None:
    """Raise ValueError, without repeating ``name``, unless it is a legal topic name."""
    if not name:
        raise ValueError("makes an empty topic name")
    if len(name) > TOPIC_CHARS:
        raise ValueError(f"makes a topic name of {len(name)} characters; Kafka allows at most {TOPIC_CHARS}")
    if name in (".", ".."):
        raise ValueError(f"makes the topic name {name!r}, which Kafka does not allow")
