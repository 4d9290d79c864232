"""Topic templates: the Kafka topic of an event from its type, key and headers.

``{type}``, ``{key}`` and ``{headers.NAME}`` are fields; other text is literal. ``{{`` and ``}}`` are literal braces,
which a topic name cannot contain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile

TOPIC_CHARS = 249
"""Longest topic name in Kafka, in characters."""
INTERNAL_PREFIX = "__"
"""The prefix of Kafka's internal topics, which events are never written to."""
REMEMBERED_TOPICS = 4096
"""Greatest number of topics cached by a template with ``{type}`` as its only field."""

_LEGAL = re.compile(rf"[a-zA-Z0-9._-]{{1,{TOPIC_CHARS}}}")
_ILLEGAL_CHARACTER = re.compile(r"[^a-zA-Z0-9._-]")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SHORT_NAME = re.compile(r"[ A-Za-z0-9_.-]{0,60}")
_TOKEN = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]*)\}|[{}]|[^{}]+")
_HEADERS = "headers."


class TopicTemplate:
    """A valid template, made by :meth:`parse`."""

    __slots__ = ("_by_type", "_constant", "_parts", "fields", "text")

    fields: tuple[str, ...]
    """The different fields without braces, in order of appearance: ``type``, ``key``, ``headers.NAME``."""

    def __init__(self, text: str, parts: tuple[tuple[bool, str], ...]) -> None:
        """Make a template of ``text``; ``parts`` are (True, field) or (False, literal)."""
        self.text = text
        self.fields = tuple(dict.fromkeys(piece for is_field, piece in parts if is_field))
        self._parts = parts
        self._constant = None if self.fields else "".join(piece for _, piece in parts)
        self._by_type: dict[str, str] = {}

    @classmethod
    def parse(cls, text: str) -> TopicTemplate:
        """Return the template in ``text``.

        Raises ValueError if ``text`` is not a template or cannot make a legal topic name. The message names the
        position, counted from 1, and for an unknown field the closest known one.
        """
        parts = tuple(_piece(found) for found in _TOKEN.finditer(text))
        template = cls(text, parts)
        fixed = sum(len(piece) for is_field, piece in parts if not is_field)
        if not template.fields:
            _check_topic(template._constant or "")
        elif fixed > TOPIC_CHARS:
            raise ValueError(f"makes topic names of more than {TOPIC_CHARS} characters")
        return template

    @property
    def start(self) -> str:
        """The literal text before the first field, with which every topic begins."""
        return "".join(piece for _, piece in takewhile(lambda part: not part[0], self._parts))

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
        if self._constant is not None:
            return self._constant
        if self.fields == ("type",):
            return self._by_type.get(event_type) or self._remember(event_type)
        return self._make(event_type, key, headers)

    def _remember(self, event_type: str) -> str:
        if len(self._by_type) >= REMEMBERED_TOPICS:
            self._by_type.clear()
        topic = self._by_type[event_type] = self._make(event_type, None, {})
        return topic

    def _make(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        made = "".join(
            _value(piece, event_type, key, headers) if is_field else piece for is_field, piece in self._parts
        )
        if not _LEGAL.fullmatch(made) or made in (".", ".."):
            _check_topic(made)
        return made

    def __eq__(self, other: object) -> bool:
        """Compare the texts of two templates."""
        return isinstance(other, TopicTemplate) and self.text == other.text

    def __hash__(self) -> int:
        """Return the hash of the text."""
        return hash(self.text)

    def __repr__(self) -> str:
        """Return the call that makes this template."""
        return f"TopicTemplate.parse({self.text!r})"


def _piece(found: re.Match[str]) -> tuple[bool, str]:
    token, at = found.group(), found.start() + 1
    if found["field"] is not None:
        return True, _field(found["field"], at)
    if token in ("{", "}"):
        raise ValueError(f"position {at}: a lone {token!r}; fields are {{type}}, {{key}} and {{headers.NAME}}")
    if token in ("{{", "}}"):
        raise ValueError(f"position {at}: a topic name cannot contain a brace; a field has single ones: {{type}}")
    if illegal := _ILLEGAL_CHARACTER.search(token):
        raise ValueError(f"position {at + illegal.start()}: a topic name cannot contain {illegal.group()!r}")
    return False, token


def _field(name: str, at: int) -> str:
    if name in ("type", "key"):
        return name
    header = name.removeprefix(_HEADERS)
    if header != name and _HEADER_NAME.fullmatch(header):
        return name
    shown = f" {{{name}}}" if _SHORT_NAME.fullmatch(name) else ""
    raise ValueError(f"position {at}: unknown field{shown}; {_meant(name)}")


def _meant(name: str) -> str:
    """Suggest a correction of an unknown field."""
    word, dot, rest = name.strip().partition(".")
    word = word.lower()
    if dot and rest and get_close_matches(word, ["headers"], 1) and _HEADER_NAME.fullmatch(rest):
        return f"did you mean {{{_HEADERS}{rest}}}?"
    if not dot and (near := get_close_matches(word, ["type", "key"], 1)):
        return f"did you mean {{{near[0]}}}?"
    return "fields are {type}, {key} and {headers.NAME}"


def _value(field: str, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
    if field == "type":
        value = event_type
    elif field == "key":
        value = key
    else:
        value = headers.get(field.removeprefix(_HEADERS))
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
