"""The table ``[sinks.NAME]`` with ``type = "kafka"``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from outbox_relay.domain.routing import matches
from outbox_relay.fields import FUNCTION, Count, as_table, matching
from outbox_relay.formats.topics import INTERNAL_PREFIX, TOPIC_CHARS, TopicTemplate
from outbox_relay.settings.problems import InvalidSetting, Problem
from outbox_relay.settings.producer import Scalar, file_problems, producer_problems
from outbox_relay.settings.registry import RegistrySettings
from outbox_relay.settings.secrets import HEADER_NAME, NOT_A_NAME
from outbox_relay.sinks.settings import SinkSettings

_NO_PROVIDER = 'should be "MODULE:FUNCTION", such as "shop.msk:token"'
_INTERNAL = "begins with __, as Kafka's internal topics do: no event goes there"
_IS_HEADER = matching(rf"(?:{HEADER_NAME})?", NOT_A_NAME)
_IS_TOPIC = matching(
    rf"[a-zA-Z0-9._*-]{{1,{TOPIC_CHARS}}}",
    f"should be the name of a topic, with * for any characters: 1 to {TOPIC_CHARS} of a-zA-Z0-9._-*",
)
_IS_PUBLIC = matching(rf"(?!{INTERNAL_PREFIX}).*", _INTERNAL)


def _template(value: str) -> str:
    if TopicTemplate.parse(value).start.startswith(INTERNAL_PREFIX):
        raise ValueError(_INTERNAL)
    return value


def _may_match(pattern: str, template: TopicTemplate) -> bool:
    """Return False if ``pattern`` matches no topic that the template makes, as far as its beginning shows."""
    if not template.fields:
        return matches(pattern, template.text)
    start = pattern.partition("*")[0]
    return start.startswith(template.start) or ("*" in pattern and template.start.startswith(start))


class KafkaSettings(SinkSettings):
    """A sink that produces to Kafka."""

    topic: Annotated[str, AfterValidator(_template)]
    """Topic of an event: a name, or a template of it with {type}, {key} and {headers.NAME}."""
    topics: tuple[Annotated[str, _IS_TOPIC, _IS_PUBLIC], ...] = Field(default=(), max_length=1000)
    """Patterns of the topics that events may make, at most 1000; by default all that do not begin with "__"."""
    partition_header: Annotated[str, _IS_HEADER] = ""
    """The event's own header that holds the number of its partition; empty: the key chooses."""
    type_header: Annotated[str, _IS_HEADER] = ""
    """The event's own header whose value becomes the header "type" of the record; empty: the event's type."""
    tombstones: bool = False
    """Send an event with an empty payload as a tombstone: a record with a key and a null value."""
    partitions: Count | None = Field(default=None, ge=1, le=10_000)
    """Partitions of a topic that the relay creates, 1 to 10000."""
    replication_factor: Count | None = Field(default=None, ge=1, le=100)
    """Copies of each partition of a topic that the relay creates, 1 to 100."""
    create_topics: bool = False
    """Create missing topics; needs partitions and replication_factor."""
    registry: RegistrySettings = Field(default_factory=RegistrySettings)
    producer: dict[str, Scalar] = Field(default_factory=dict, repr=False, validate_default=True)
    """librdkafka's settings, passed unchanged, "bootstrap.servers" at least."""
    producer_files: dict[str, Path] = Field(default_factory=dict, repr=False)
    """Settings of librdkafka whose values are in files, read whenever a producer is made, and at SIGHUP."""
    token_provider: Annotated[str, matching(rf"(?:{FUNCTION})?", _NO_PROVIDER)] = Field(
        default="", max_length=255, validate_default=True
    )
    """The function that returns tokens for OAUTHBEARER and their lifetimes in seconds, "MODULE:FUNCTION"."""

    @field_validator("max_in_flight_total")
    @classmethod
    def _has_no_requests(cls, value: int) -> int:
        if value:
            raise ValueError("has no meaning for Kafka, whose events are sent in batches: limit rate_per_second")
        return value

    @field_validator("topics")
    @classmethod
    def _allow_the_topic(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        template = TopicTemplate.parse(info.data.get("topic", "{type}"))
        if value and not any(_may_match(pattern, template) for pattern in value):
            allowed = "any topic" if template.fields else "the topic"
            raise ValueError(f"does not allow {allowed} of this sink: add it, or leave topics out")
        return value

    @field_validator("registry")
    @classmethod
    def _keeps_the_payload(cls, value: RegistrySettings, info: ValidationInfo) -> RegistrySettings:
        if value.url and info.data.get("cloudevents") == "structured":
            raise ValueError('excludes cloudevents = "structured", whose values are JSON: use "binary"')
        return value

    @field_validator("create_topics")
    @classmethod
    def _has_their_form(cls, value: bool, info: ValidationInfo) -> bool:
        missing = [name for name in ("partitions", "replication_factor") if value and info.data.get(name, 1) is None]
        if missing:
            required = "is required with create_topics = true"
            raise InvalidSetting((Problem((name,), required) for name in missing), in_table=True)
        return value

    @field_validator("producer", mode="before")
    @classmethod
    def _keeps_guarantees(cls, value: object) -> object:
        if as_table(value) is value and (wrong := [*producer_problems(as_table(value))]):
            raise InvalidSetting(wrong)
        return value

    @field_validator("producer_files")
    @classmethod
    def _may_be_in_files(cls, value: dict[str, Path], info: ValidationInfo) -> dict[str, Path]:
        if wrong := [*file_problems(value, info.data.get("producer", {}))]:
            raise InvalidSetting(wrong)
        return value

    @field_validator("token_provider")
    @classmethod
    def _has_one_source(cls, value: str, info: ValidationInfo) -> str:
        producer = {name: str(each).lower() for name, each in info.data.get("producer", {}).items()}
        mechanism = producer.get("sasl.mechanism", producer.get("sasl.mechanisms"))
        unsecured = producer.get("enable.sasl.oauthbearer.unsecure.jwt") in ("true", "t", "1")
        builtin = unsecured or producer.get("sasl.oauthbearer.method") == "oidc"
        if value and mechanism != "oauthbearer":
            raise ValueError('needs "sasl.mechanism" = "OAUTHBEARER" in producer')
        if value and builtin:
            raise ValueError("excludes librdkafka's own tokens: remove one of the two from the settings")
        if mechanism == "oauthbearer" and not value and not builtin and "producer" in info.data:
            raise ValueError(
                'is required by "sasl.mechanism" = "OAUTHBEARER" in producer, '
                'unless that also has "sasl.oauthbearer.method" = "oidc"'
            )
        return value

    def topic_template(self) -> TopicTemplate:
        """Return ``topic``, ready to render."""
        return TopicTemplate.parse(self.topic)
