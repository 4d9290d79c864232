"""Texts of plug-ins without the values that they must not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, cast

from outbox_relay.domain import redaction
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import clip
from outbox_relay.sinks.settings import SHOWN, PluginSettings

HIDDEN = "…"
SHORTEST = 4
"""Least number of characters of a value that is searched for in a text. Shorter ones are parts of any text."""


def own_texts(settings: PluginSettings) -> list[str]:
    """Return the texts in the plug-in's own settings, in full length, except those marked ``SHOWN``."""
    own: list[str] = []
    for name, field in type(settings).model_fields.items():
        if name not in PluginSettings.model_fields and SHOWN not in field.metadata:
            own += texts_in(getattr(settings, name))
    return own


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


def without(text: str, hidden: Sequence[str], personal: Sequence[str] = ()) -> str:
    """Return ``text`` as a line in which each text in ``hidden`` and ``personal`` is replaced, the longest first.

    Those in ``personal``, such as a key, are replaced as whole words only.
    """
    for each in sorted({*hidden, *personal}, key=len, reverse=True):
        if len(each) >= SHORTEST:
            text = redaction.without(text, each, HIDDEN, anywhere=each in hidden)
    return clip(text)


def of_event(event: StoredEvent) -> list[str]:
    """Return what a text about ``event`` must not repeat: its key and its payload."""
    return [event.key or "", event.payload.decode(errors="replace")]
