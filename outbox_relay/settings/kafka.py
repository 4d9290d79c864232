"""The table ``[sinks.NAME]`` with ``type = "kafka"``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.domain.routing import matches
from outbox_relay.formats.topics import INTERNAL_PREFIX, TOPIC_CHARS, TOPICS_MAX, TopicTemplate
from outbox_relay.settings import raw
from outbox_relay.settings.every_sink import SinkSettings
from outbox_relay.settings.fields import Count
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.producer import Scalar, refusals, refusals_of_files

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_PATTERN = re.compile(rf"[a-zA-Z0-9._*-]{{1,{TOPIC_CHARS}}}")
_INTERNAL = "begins with __, as Kafka's internal topics do: no event goes there"


def _topic_pattern(value: object) -> object:
    if not isinstance(value, str) or not _PATTERN.fullmatch(value):
        raise ValueError(
            f"should be the name of a topic, with * for any characters: 1 to {TOPIC_CHARS} of a-zA-Z0-9._-*"
        )
    if value.startswith(INTERNAL_PREFIX):
        raise ValueError(_INTERNAL)
    return value


class KafkaSettings(SinkSettings):
    """A sink that produces to Kafka."""

    type: Literal["kafka"]
    """The kind of sink."""
    topic: str
    """Topic of an event: a name, or a template of it with {type}, {key} and {headers.NAME}."""
    topics: tuple[Annotated[str, BeforeValidator(_topic_pattern)], ...] = Field(
        default=(), max_length=1000, validate_default=True
    )
    """Patterns of the topics that events may make, at most 1000; left out: every one that does not begin with "__"."""
    topics_max: Count = Field(default=TOPICS_MAX, ge=1, le=100_000)
    """Different topics that events may make, 1 to 100000; those in topics without * do not count."""
    partition_header: str = ""
    """The event's own header that holds the number of its partition; empty: the key chooses."""
    type_header: str = ""
    """The event's own header whose value stands in the header "type" of the record; empty: the event's type."""
    tombstones: bool = False
    """Whether an event with an empty payload becomes a tombstone: a record with a key and a null value."""
    partitions: Count | None = Field(default=None, ge=1, le=10_000)
    """Partitions of a topic that the relay creates, 1 to 10000."""
    replication_factor: Count | None = Field(default=None, ge=1, le=100)
    """Copies of each partition of a topic that the relay creates, 1 to 100."""
    create_topics: bool = False
    """Whether the relay creates topics that are missing; needs partitions and replication_factor."""
    producer: dict[str, Scalar] = Field(default_factory=dict, repr=False, validate_default=True)
    """librdkafka's settings as they stand, "bootstrap.servers" at least."""
    producer_files: dict[str, Path] = Field(default_factory=dict, repr=False)
    """Further settings of librdkafka whose values stand in files, such as "sasl.password"; read whenever a producer is
    made, and at SIGHUP."""

    @field_validator("topic")
    @classmethod
    def _is_template(cls, value: str) -> str:
        if TopicTemplate.parse(value).start.startswith(INTERNAL_PREFIX):
            raise ValueError(_INTERNAL)
        return value

    @field_validator("topics")
    @classmethod
    def _allow_the_topic(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        topic: str | None = info.data.get("topic")
        if not value or topic is None or TopicTemplate.parse(topic).fields:
            return value
        if not any(matches(pattern, topic) for pattern in value):
            raise ValueError("does not allow the topic of this sink: add it, or leave topics out")
        return value

    @field_validator("partition_header", "type_header")
    @classmethod
    def _is_header(cls, value: str) -> str:
        if value and not _HEADER_NAME.fullmatch(value):
            raise ValueError("should be the name of a header: 1 to 128 letters, digits and hyphens")
        return value

    @field_validator("create_topics")
    @classmethod
    def _knows_how(cls, value: bool, info: ValidationInfo) -> bool:
        wrong = [
            Problem((name,), "is required with create_topics = true")
            for name in ("partitions", "replication_factor")
            if value and name in info.data and info.data[name] is None
        ]
        if wrong:
            raise Wrong(wrong, beside=True)
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

    @field_validator("producer_files")
    @classmethod
    def _may_stand_in_files(cls, value: dict[str, Path], info: ValidationInfo) -> dict[str, Path]:
        if wrong := refusals_of_files(value, info.data.get("producer", {})):
            raise Wrong(wrong)
        return value

    def topic_template(self) -> TopicTemplate:
        """``topic``, ready to render."""
        return TopicTemplate.parse(self.topic)
