"""What an event becomes in Kafka: its topic and its headers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from outbox_relay.event import Event
from outbox_relay.policy import Refused, Verdict

_STRINGS: frozenset[type] = frozenset((str,))


class Template(Protocol):
    """What the sink asks of a topic template."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields it is made of: ``type``, ``key``, ``headers.NAME``; none when every event has the same topic."""
        ...

    def render(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        """The topic of an event. Raises ValueError when it has none, with a reason that holds no value."""
        ...


class Topics:
    """Names the topic of each event of a batch."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._of_headers = any(name.startswith("headers.") for name in template.fields)
        self.constant = None if template.fields else template.render("", None, {})
        """The one topic of all events, if the template has no field."""

    def of(self, batch: Sequence[Event], judged: dict[int, Verdict]) -> Sequence[str | None]:
        """The topic of each place; none where the event can have no topic, which ``judged`` then says."""
        if self.constant is not None:
            return [self.constant] * len(batch)
        return [self._topic(place, event, judged) for place, event in enumerate(batch)]

    def _topic(self, place: int, event: Event, judged: dict[int, Verdict]) -> str | None:
        try:
            headers = dict(own_headers(event.headers)) if self._of_headers and event.headers else {}
            return self._template.render(event.type, event.key, headers)
        except ValueError as reason:
            judged[place] = Refused(str(reason))
            return None


def own_headers(text: str) -> list[tuple[str, str]]:
    """The event's own headers in their order. Raises ValueError unless ``text`` is a JSON object of strings."""
    try:
        found: object = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        headers = cast("dict[str, str]", found)
        if _STRINGS.issuperset(map(type, headers.values())):
            return list(headers.items())
    raise ValueError("the event's headers are not a JSON object of strings")
