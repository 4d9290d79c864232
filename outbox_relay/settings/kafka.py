"""The table ``[sinks.NAME]`` with ``type = "kafka"``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from outbox_relay.envelope import TopicTemplate
from outbox_relay.settings import raw
from outbox_relay.settings.every_sink import EverySink
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.producer import Scalar, refusals


class KafkaSink(EverySink):
    """A sink that produces to Kafka."""

    type: Literal["kafka"]
    """The kind of sink."""
    topic: str
    """Topic of an event: a name, or a template of it with {type}, {key} and {headers.NAME}."""
    producer: dict[str, Scalar] = Field(default_factory=dict, repr=False, validate_default=True)
    """librdkafka's settings as they stand, "bootstrap.servers" at least."""

    @field_validator("topic")
    @classmethod
    def _is_template(cls, value: str) -> str:
        TopicTemplate.parse(value)
        return value

    @field_validator("producer", mode="before")
    @classmethod
    def _is_flat(cls, value: object) -> object:
        wrong = [
            Problem(
                (name,), f'should be text, a number or true or false; a name with dots stands in quotes: "{name}.…"'
            )
            for name, entry in (raw.table(value) or {}).items()
            if not isinstance(entry, Scalar)
        ]
        if wrong:
            raise Wrong(wrong)
        return value

    @field_validator("producer")
    @classmethod
    def _keeps_guarantees(cls, value: dict[str, Scalar]) -> dict[str, Scalar]:
        if wrong := refusals(value):
            raise Wrong(wrong)
        return value

    def topic_template(self) -> TopicTemplate:
        """``topic``, ready to render."""
        return TopicTemplate.parse(self.topic)
