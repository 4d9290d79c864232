"""The tables ``[sinks.NAME]``: what a Kafka sink and a webhook sink can be told."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from outbox_relay.envelope import TopicTemplate
from outbox_relay.errors import Misconfigured
from outbox_relay.policy import RetryPolicy
from outbox_relay.settings.addresses import Address, Network, denied
from outbox_relay.settings.destination import check_url
from outbox_relay.settings.fields import Count, Number, Section
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.producer import Scalar, refusals

SINK_NAME = re.compile(r"(?!.*__)[a-z][a-z0-9_]{0,39}")
"""A sink's name: it is part of variables' names, in which ``__`` separates."""
SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of a secret is none
SECRETS = 16
"""Secrets of one webhook, at most: each adds a signature to every request."""
FORWARDED_HEADERS = 32
"""Headers of the event that a webhook passes on, at most."""

_EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_OWN_HEADERS = frozenset(
    "accept accept-encoding connection cookie expect host idempotency-key keep-alive te traceparent trailer "
    "transfer-encoding upgrade user-agent".split()
)
_OWN_PREFIXES = ("webhook-", "outbox-", "content-", "proxy-", "ce-", "x-amz-", "x-goog-", "x-envoy-", "x-forwarded-")


class Retry(Section):
    """When an event that failed is tried again: ``base_seconds``·2ⁿ up to ``max_seconds``, give or take ``jitter``."""

    attempts: Count = Field(30, ge=1, le=10_000)
    """Attempts before an event is dead, 1 to 10000."""
    base_seconds: Number = Field(1.0, gt=0, le=86_400)
    """Delay after the first failure, doubled after each further one, in seconds, above 0 and at most 86400."""
    max_seconds: Number = Field(3600.0, gt=0, le=604_800, validate_default=True)
    """Longest delay, in seconds, base_seconds to 604800."""
    jitter: Number = Field(0.2, ge=0, le=1)
    """Part of a delay by which it is made shorter or longer at random, 0 to 1."""

    @field_validator("max_seconds")
    @classmethod
    def _not_below_base(cls, value: float, info: ValidationInfo) -> float:
        return _not_below(value, "base_seconds", info)


class Circuit(Section):
    """When a sink is left alone because its destination is down, and how it is probed."""

    open_after: Count = Field(20, ge=1, le=10_000)
    """Failures in a row, of different events, after which the sink pauses, 1 to 10000."""
    probe_seconds: Number = Field(1.0, gt=0, le=3600)
    """Time to the first probe, doubled after each further one, in seconds, above 0 and at most 3600."""
    probe_max_seconds: Number = Field(60.0, gt=0, le=86_400, validate_default=True)
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
        if isinstance(value, Mapping):
            wrong = [
                Problem((str(name),), f'should be a string, number or boolean; a name with dots stands in quotes: "{name}.…"')
                for name, item in value.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                if not isinstance(item, Scalar)
            ]
            if wrong:
                raise Wrong(wrong)
        return value  # pyright: ignore[reportUnknownVariableType]

    @field_validator("producer")
    @classmethod
    def _keeps_guarantees(cls, value: dict[str, Scalar]) -> dict[str, Scalar]:
        if wrong := refusals(value):
            raise Wrong(wrong)
        return value

    def topic_template(self) -> TopicTemplate:
        """``topic``, ready to render."""
        return TopicTemplate.parse(self.topic)


def check_secret(text: str) -> bytes:
    """The key in a signing secret: ``whsec_`` and standard base64, padded, of 24 to 64 bytes.

    Raises ValueError, without the secret, when ``text`` is anything else.
    """
    if not text.startswith(SECRET_PREFIX):
        raise ValueError(f"should be {SECRET_PREFIX} followed by the base64 of 24 to 64 random bytes")
    encoded = text.removeprefix(SECRET_PREFIX)
    try:
        key = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if base64.b64encode(key).decode() != encoded:
        raise ValueError(f"is not standard base64 with its padding after {SECRET_PREFIX}")
    if not 24 <= len(key) <= 64:
        raise ValueError(f"holds {len(key)} bytes after {SECRET_PREFIX}, should hold 24 to 64")
    return key


class SigningSecret(Section):
    """A secret that requests are signed with; in the file a string, or a table with its end."""

    secret: SecretStr
    """"whsec_" and the base64 of 24 to 64 random bytes."""
    until: AwareDatetime | None = None
    """When it no longer signs, a date and time with an offset; left out: never."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"secret": value} if isinstance(value, str | SecretStr) else value

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: SecretStr) -> SecretStr:
        check_secret(value.get_secret_value())
        return value

    def key(self) -> bytes:
        """The key of the HMAC, 24 to 64 bytes."""
        return check_secret(self.secret.get_secret_value())


def _network(value: object) -> object:
    if not isinstance(value, str):
        return value
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
    allow_networks: tuple[Annotated[Network, BeforeValidator(_network)], ...] = Field((), max_length=256)
    """Private networks that may be addressed, such as "10.1.0.0/16"."""
    url: str = Field(repr=False)
    """Where events are posted to: https, without credentials."""
    secrets: tuple[SigningSecret, ...] = Field((), max_length=SECRETS)
    """Secrets, at most 16: all sign until their end, so that receivers can change over one after the other."""
    secrets_file: Path | None = Field(None, validate_default=True)
    """A file with a secret in each line, instead of secrets; read at start and on SIGHUP."""
    timeout_seconds: Number = Field(15.0, gt=0, le=60)
    """Longest time for one request from connecting to the end of the answer, in seconds, above 0 and at most 60."""
    max_in_flight: Count = Field(64, ge=1, le=4096)
    """Requests under way at once in one relay, 1 to 4096."""
    forward_headers: tuple[str, ...] = Field((), max_length=FORWARDED_HEADERS)
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
        if isinstance(value, list | tuple) and not value:
            raise ValueError("is empty: requests are signed with at least one secret")
        return value  # pyright: ignore[reportUnknownVariableType]

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

        In the file each line is a secret; empty lines and those that begin with ``#`` are passed over. Blocks for as long
        as reading a small file takes. Raises Misconfigured, without any of its content, when the file cannot be read,
        holds no secret or a line that is none.
        """
        return self.secrets if self.secrets_file is None else _read_secrets(self.secrets_file)

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


def _read_secrets(path: Path) -> tuple[SigningSecret, ...]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "holds characters beyond ASCII"
        raise Misconfigured(f"secrets_file {path}: {reason}") from None
    found: list[SigningSecret] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            check_secret(text)
        except ValueError as error:
            raise Misconfigured(f"secrets_file {path}: line {number}: {error}") from None
        found.append(SigningSecret(secret=SecretStr(text)))
    if not 1 <= len(found) <= SECRETS:
        raise Misconfigured(f"secrets_file {path}: holds {len(found)} secrets, should hold 1 to {SECRETS}, one a line")
    return tuple(found)


Sink = Annotated[KafkaSink | WebhookSink, Discriminator("type")]
"""A table ``[sinks.NAME]``; which one it is stands in its ``type``."""

SINKS: dict[str, type[KafkaSink] | type[WebhookSink]] = {"kafka": KafkaSink, "webhook": WebhookSink}
"""The models of sinks by their ``type``."""


def check_sink_name(name: Any) -> Any:
    """``name`` if it is one for a sink. Raises ValueError otherwise."""
    if not isinstance(name, str) or not SINK_NAME.fullmatch(name):
        raise ValueError("a sink's name is 1 to 40 of a-z, 0-9 and _, begins with a letter and holds no __")
    return name
