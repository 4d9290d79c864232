"""The table ``[sinks.NAME]`` with ``type = "kafka"``, and its table ``registry``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.domain.routing import matches
from outbox_relay.fields import FUNCTION, Count, Number, Secret, Section, as_table, listed, matching, parsed_by
from outbox_relay.formats.topics import INTERNAL_PREFIX, TOPIC_CHARS, TopicTemplate
from outbox_relay.settings.problems import InvalidSetting
from outbox_relay.settings.producer import Scalar, producer_problems
from outbox_relay.settings.webhook import HEADER_NAME, NOT_A_NAME
from outbox_relay.sinks.settings import SinkSettings, TlsSettings

_NO_PROVIDER = 'should be "MODULE:FUNCTION", such as "shop.msk:token"'
_INTERNAL = "begins with __, as Kafka's internal topics do: no event goes there"
_IS_HEADER = matching(rf"(?:{HEADER_NAME})?", NOT_A_NAME)
_IS_TOPIC = matching(
    rf"[a-zA-Z0-9._*-]{{1,{TOPIC_CHARS}}}",
    f"should be the name of a topic, with * for any characters: 1 to {TOPIC_CHARS} of a-zA-Z0-9._-*",
)
_IS_PUBLIC = matching(rf"(?!{INTERNAL_PREFIX}).*", _INTERNAL)
_IS_RECORD = matching(
    r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*",
    "should be the full name of a record or message, such as com.example.OrderPlaced",
)


def _addresses(value: str) -> str:
    """Return ``value`` if it is empty or holds addresses. Raise ValueError, without it, otherwise."""
    for url in value.split(",") if value else ():
        try:
            parts = urlsplit(url.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        else:
            if parts.username is not None or parts.password is not None:
                raise ValueError("should hold no credentials: set user_info")
            usable = usable and not parts.query and not parts.fragment
        if not usable:
            raise ValueError('should be the address of a registry, such as "https://registry.internal:8081"')
    return value


def _user_info(value: str) -> str:
    if ":" not in value:
        raise ValueError('should be "USER:PASSWORD"')
    return value


class RegistrySettings(TlsSettings):
    """The schema registry of a Kafka sink, whose records then have Confluent's wire format."""

    url: Annotated[str, AfterValidator(_addresses)] = Field(default="", repr=False)
    """Address of the registry, or several with commas between them; empty: payloads are sent as they are."""
    format: Literal["avro", "json", "protobuf"] | None = Field(default=None, validate_default=True)
    """Format of records: "avro", "json" for JSON Schema, or "protobuf"; required with url."""
    subject_name_strategy: Literal["topic", "record", "topic-record"] = "topic"
    """Subjects: TOPIC-value ("topic"), the record's name ("record"), or TOPIC-RECORD ("topic-record")."""
    records: dict[str, Annotated[str, _IS_RECORD]] = Field(default_factory=dict, max_length=1000)
    """Full names of records or messages by event type; by default the type itself."""
    missing_seconds: Number = Field(default=600.0, ge=0, le=604_800)
    """Time for which events wait for a schema that is missing or unusable before they are dead, 0 to 604800."""
    user_info: Annotated[Secret, parsed_by(_user_info)] | None = None
    """"USER:PASSWORD" for basic authentication, read whenever the registry is asked."""

    @field_validator("format")
    @classmethod
    def _belongs_to_a_registry(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("url") == "":
            raise ValueError("needs url, the address of the registry")
        if value is None and info.data.get("url"):
            raise ValueError('is required with url: "avro", "json" or "protobuf"')
        return value


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


class TopicCreation(Section):
    """The topics that a relay creates when they are missing."""

    partitions: Count = Field(ge=1, le=10_000)
    """Partitions of a topic, 1 to 10000."""
    replication_factor: Count = Field(ge=1, le=100)
    """Copies of each partition, 1 to 100."""


Topics: TypeAlias = Annotated[
    tuple[Annotated[str, _IS_TOPIC, _IS_PUBLIC], ...], Field(max_length=1000), BeforeValidator(listed)
]


class KafkaSettings(SinkSettings):
    """A sink that produces to Kafka."""

    type: Literal["kafka"]  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, and frozen
    """The kind of sink."""
    topic: Annotated[str, AfterValidator(_template)]
    """Topic of an event: a name, or a template of it with {type}, {key} and {headers.NAME}."""
    topics: Topics = ()
    """Patterns of the topics that events may make, at most 1000; by default all that do not begin with "__"."""
    partition_header: Annotated[str, _IS_HEADER] = ""
    """The event's own header that holds the number of its partition; empty: the key chooses."""
    type_header: Annotated[str, _IS_HEADER] = ""
    """The event's own header whose value becomes the header "type" of the record; empty: the event's type."""
    tombstones: bool = False
    """Send an event with an empty payload as a tombstone: a record with a key and a null value."""
    create_topics: TopicCreation | None = None
    """Create missing topics; by default the brokers decide."""
    registry: RegistrySettings = Field(default_factory=RegistrySettings)
    """The schema registry."""
    producer: dict[str, Scalar | Secret] = Field(default_factory=dict, repr=False, validate_default=True)
    """librdkafka's settings, passed unchanged, "bootstrap.servers" at least; values may be secrets."""
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

    @field_validator("producer", mode="before")
    @classmethod
    def _keeps_guarantees(cls, value: object) -> object:
        if as_table(value) is value and (wrong := [*producer_problems(as_table(value))]):
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

    @property
    def plain_producer(self) -> dict[str, Scalar]:
        """The settings of the producer that are not secrets in another place."""
        return {name: value for name, value in self.producer.items() if not isinstance(value, Secret)}

    @property
    def secret_producer(self) -> dict[str, Secret]:
        """The settings of the producer that are in files or variables, read for each client."""
        return {name: value for name, value in self.producer.items() if isinstance(value, Secret)}
