"""The tables ``[sinks.NAME]``: what a Kafka sink and a webhook sink can be told."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, ValidationInfo, field_validator

from outbox_relay.envelope import TopicTemplate
from outbox_relay.policy import RetryPolicy
from outbox_relay.settings import raw
from outbox_relay.settings.addresses import Address, Network, denied
from outbox_relay.settings.destination import check_url
from outbox_relay.settings.fields import Count, Number, Section
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.producer import Scalar, refusals
from outbox_relay.settings.secrets import SECRETS, SigningSecret, read_secrets

SINK_NAME = re.compile(r"(?!.*__)[a-z][a-z0-9_]{0,39}")
"""A sink's name: it is part of variables' names, in which ``__`` separates."""
FORWARDED_HEADERS = 32
"""Headers of the event that a webhook passes on, at most."""

_EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_OWN_HEADERS = frozenset(
    (
        *("accept", "accept-encoding", "connection", "cookie", "expect", "host", "idempotency-key", "keep-alive"),
        *("te", "traceparent", "trailer", "transfer-encoding", "upgrade", "user-agent"),
    )
)
_OWN_PREFIXES = ("webhook-", "outbox-", "content-", "proxy-", "ce-", "x-amz-", "x-goog-", "x-envoy-", "x-forwarded-")


class Retry(Section):
    """When an event that failed is tried again: ``base_seconds``·2ⁿ up to ``max_seconds``, give or take ``jitter``."""

    attempts: Count = Field(default=30, ge=1, le=10_000)
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Number = Field(default=1.0, gt=0, le=86_400)
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Number = Field(default=3600.0, gt=0, le=604_800, validate_default=True)
    """Longest delay, in seconds, base_seconds to 604800."""
    jitter: Number = Field(default=0.2, ge=0, le=1)
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""

    @field_validator("max_seconds")
    @classmethod
    def _not_below_base(cls, value: float, info: ValidationInfo) -> float:
        return _not_below(value, "base_seconds", info)


class Circuit(Section):
    """When a sink is left alone because its destination is down, and how it is probed."""

    open_after: Count = Field(default=20, ge=1, le=10_000)
    """Failures in a row, of different events, after which the sink pauses, 1 to 10000."""
    probe_seconds: Number = Field(default=1.0, gt=0, le=3600)
    """Time to the first probe, doubled after each further one, in seconds, above 0 and at most 3600."""
    probe_max_seconds: Number = Field(default=60.0, gt=0, le=86_400, validate_default=True)
    """Longest time between probes, in seconds, probe_seconds to 86400."""

    @field_validator("probe_max_seconds")
    @classmethod
    def _not_below_first(cls, value: float, info: ValidationInfo) -> float:
        return _not_below(value, "probe_seconds", info)


def _not_below(value: float, other: str, info: ValidationInfo) -> float:
    least = info.data.get(other)
    if least is not None and value < least:
        raise ValueError(f"is {value:g}, should not be below {other}, which is {least:g}")
    return value


class _Sink(Section):
    """What every sink has."""

    order: Literal["key", "none"] = "key"
    """Whether events of one key arrive in the order of their commits ("key") or as they come ("none")."""
    start: Literal["beginning", "now"] | None = None
    """Where a sink that the database does not know yet begins; left out: "beginning" for the first sinks of a database,
    "now" for later ones."""
    when_dead: Literal["skip", "hold"] = "skip"
    """Whether later events of a key go on after a dead letter of it ("skip") or wait for a person ("hold")."""
    retry: Retry = Field(default_factory=Retry)
    circuit: Circuit = Field(default_factory=Circuit)

    def retry_policy(self) -> RetryPolicy:
        """The table ``retry`` as the value that decisions are made with."""
        return RetryPolicy(self.retry.attempts, self.retry.base_seconds, self.retry.max_seconds, self.retry.jitter)


class KafkaSink(_Sink):
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


def _network(value: object) -> object:
    if isinstance(value, Network):
        return value
    if not isinstance(value, str):
        raise ValueError('should be a network such as "10.1.0.0/16" or an address')  # noqa: TRY004 - as in fields
    try:
        return ip_network(value)
    except ValueError:
        pass
    try:
        exact = ip_network(value, strict=False)
    except ValueError:
        raise ValueError('should be a network such as "10.1.0.0/16" or an address') from None
    raise ValueError(f'has bits set behind its length: the network is "{exact}"')


class WebhookSink(_Sink):
    """A sink that posts each event to a URL, signed."""

    type: Literal["webhook"]
    """The kind of sink."""
    allow_http: bool = False
    """Whether a plain http:// URL is taken."""
    allow_networks: tuple[Annotated[Network, BeforeValidator(_network)], ...] = Field(default=(), max_length=256)
    """Private networks that may be addressed, such as "10.1.0.0/16"."""
    url: str = Field(repr=False)
    """Where events are posted to: https, without credentials."""
    secrets: tuple[SigningSecret, ...] = Field(default=(), max_length=SECRETS)
    """Secrets, at most 16: all sign until their end, so that receivers can change over one after the other."""
    secrets_file: Path | None = Field(default=None, validate_default=True)
    """A file with a secret in each line, instead of secrets; read at start and on SIGHUP."""
    timeout_seconds: Number = Field(default=15.0, gt=0, le=60)
    """Longest time for one request from connecting to the end of the answer, in seconds, above 0 and at most 60."""
    max_in_flight: Count = Field(default=64, ge=1, le=4096)
    """Requests under way at once in one relay, 1 to 4096."""
    forward_headers: tuple[str, ...] = Field(default=(), max_length=FORWARDED_HEADERS)
    """Names of the event's own headers that are passed on, at most 32, in lower case; none by default."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str, info: ValidationInfo) -> str:
        allowed = info.data.get("allow_networks", _EVERYWHERE)
        check_url(value, allow_http=info.data.get("allow_http", True), allowed=allowed)
        return value

    @field_validator("secrets", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if raw.items(value) == []:
            raise ValueError("is empty: requests are signed with at least one secret")
        return value

    @field_validator("secrets_file")
    @classmethod
    def _one_source(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None and info.data.get("secrets") == ():
            raise Wrong([Problem(("secrets",), "is required, or secrets_file: requests are signed")], beside=True)
        if value is not None and info.data.get("secrets", ()) != ():
            raise ValueError("excludes secrets: give one of the two")
        return value

    @field_validator("forward_headers")
    @classmethod
    def _may_be_forwarded(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [Problem((n,), text) for n, name in enumerate(value) if (text := _header_refusal(name)) is not None]
        if wrong:
            raise Wrong(wrong)
        return tuple(dict.fromkeys(name.lower() for name in value))

    def signing_secrets(self) -> tuple[SigningSecret, ...]:
        """The secrets, from ``secrets_file`` at each call if that is set.

        In the file each line is a secret; empty lines and those that begin with ``#`` are passed over. Blocks for
        as long as reading a small file takes. Raises Misconfigured, without any of its content, when the file cannot be
        read, holds no secret or a line that is none.
        """
        return self.secrets if self.secrets_file is None else read_secrets(self.secrets_file)

    def denied(self, address: Address | str) -> str | None:
        """Why this sink does not connect to ``address``, in a word or two; nothing when it may.

        To be asked for every address that the host's name stands for. Raises ValueError when the text is no address.
        """
        return denied(address, self.allow_networks)


def _header_refusal(name: str) -> str | None:
    if not _TOKEN.fullmatch(name):
        return "should be the name of a header: 1 to 128 letters, digits and hyphens"
    if name.lower() in _OWN_HEADERS or name.lower().startswith(_OWN_PREFIXES):
        return "is a header that the relay or the connection sets itself"
    return None


Sink = Annotated[KafkaSink | WebhookSink, Discriminator("type")]
"""A table ``[sinks.NAME]``; which one it is stands in its ``type``."""

SINKS: dict[str, type[KafkaSink] | type[WebhookSink]] = {"kafka": KafkaSink, "webhook": WebhookSink}
"""The models of sinks by their ``type``."""


def check_sink_name(name: Any) -> Any:
    """``name`` if it is one for a sink. Raises ValueError otherwise."""
    if not isinstance(name, str) or not SINK_NAME.fullmatch(name):
        raise ValueError("a sink's name is 1 to 40 of a-z, 0-9 and _, begins with a letter and holds no __")
    return name
