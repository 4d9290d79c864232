"""The topic of each event, and the topics that events may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.routing import matches
from outbox_relay.formats.headers import own_headers
from outbox_relay.formats.topics import INTERNAL_PREFIX, TOPICS_MAX

MAX_REMEMBERED_TOPICS = 4096
"""Maximum number of allowed topics remembered."""


class Template(Protocol):
    """The part of a topic template that the sink uses."""

    @property
    def text(self) -> str:
        """Return the template as the settings have it."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields: ``type``, ``key``, ``headers.NAME``. Without any, all events have one topic."""
        ...

    def render(self, event_type: str, key: str | None, headers: Mapping[str, str]) -> str:
        """Return the topic of an event. Raise ValueError, without any value, for an event that has none."""
        ...


class TopicResolver:
    """Finds the topic of each event of a batch.

    ``allowed`` are patterns of the topics that events may name. Without any, every topic is allowed except Kafka's
    internal topics, whose names begin with ``__``. The sink may create at most ``max_topics`` topics.
    """

    def __init__(self, template: Template, allowed: Sequence[str] = (), max_topics: int = TOPICS_MAX) -> None:
        self.max_topics = max_topics
        self.constant = None if template.fields else template.render("", None, {})
        """The topic of all events if the template has no field, else None."""
        self.text = template.text
        self._template = template
        self._allowed = tuple(allowed)
        self._known: set[str] = set()
        self._uses_headers = any(name.startswith("headers.") for name in template.fields)

    def resolve(self, batch: Sequence[StoredEvent], refuse: Callable[[int, str], None]) -> list[str | None]:
        """Return the topic of each event. For an event without one, return None and call ``refuse``."""
        if self.constant is not None:
            return [self.constant] * len(batch)
        return [self._topic(index, event, refuse) for index, event in enumerate(batch)]

    def _topic(self, index: int, event: StoredEvent, refuse: Callable[[int, str], None]) -> str | None:
        try:
            headers = dict(own_headers(event.headers)) if self._uses_headers and event.headers else {}
            topic = self._template.render(event.type, event.key, headers)
            if topic not in self._known:
                self._check(topic)
        except ValueError as reason:
            refuse(index, str(reason))
            return None
        except Exception as reason:
            refuse(index, f"the event cannot be made into a record ({type(reason).__name__})")
            return None
        return topic

    def of_type(self, event_type: str) -> str | None:
        """Return the topic of events of ``event_type``, or None if it depends on more than that."""
        if self.constant is not None:
            return self.constant
        if self._template.fields != ("type",):
            return None
        try:
            return self._template.render(event_type, None, {})
        except ValueError:
            return None

    @property
    def named(self) -> frozenset[str]:
        """Return the allowed topics that the settings name in full."""
        return frozenset(pattern for pattern in self._allowed if "*" not in pattern)

    def _check(self, topic: str) -> None:
        """Raise ValueError, with the setting to change, if ``topic`` is not allowed."""
        if topic.startswith(INTERNAL_PREFIX):
            raise ValueError(f"topic {topic}: names that begin with {INTERNAL_PREFIX} are Kafka's own")
        if self._allowed and not any(matches(pattern, topic) for pattern in self._allowed):
            raise ValueError(f"topic {topic} is not among the topics of this sink: add it to the setting topics")
        if len(self._known) >= MAX_REMEMBERED_TOPICS:
            self._known.clear()
        self._known.add(topic)
