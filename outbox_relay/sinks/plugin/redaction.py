"""Messages of a plug-in's model without the values of its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, cast

from outbox_relay.domain import redaction
from outbox_relay.domain.outcomes import clip

HIDDEN = "…"
SHORTEST = 4
"""Least number of characters of a value that is searched for in a text. Shorter ones are parts of any text."""


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text inside ``value``: a table, list, model or secret of any depth that settings have."""
    match value:
        case str():
            yield value
        case None | bool() | int() | float():
            return
        case Mapping():
            for each in cast("Mapping[object, object]", value).values():
                yield from texts_in(each)
        case bytes():
            yield value.decode(errors="replace")
        case Sequence() | Set():
            for each in cast("Sequence[object]", value):
                yield from texts_in(each)
        case _ if hasattr(value, "get_secret_value"):
            yield from texts_in(value.get_secret_value())
        case _ if hasattr(value, "model_fields"):
            yield from texts_in(dict(value))
        case _:
            yield str(value)


def without(text: str, hidden: Sequence[str]) -> str:
    """Return ``text`` as a line in which each text in ``hidden`` is replaced, the longest first."""
    for each in sorted(set(hidden), key=len, reverse=True):
        if len(each) >= SHORTEST:
            text = redaction.without(text, each, HIDDEN, anywhere=True)
    return clip(text)
