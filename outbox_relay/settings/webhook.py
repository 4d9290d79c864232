"""The table ``[sinks.NAME]`` with ``type = "webhook"``."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import Count, Number, excludes, needs
from outbox_relay.formats.signatures import SigningKey
from outbox_relay.settings.addresses import EVERYWHERE, Address, Network, check_url, denied, proxy_endpoint
from outbox_relay.settings.problems import InvalidSetting, Problem
from outbox_relay.settings.schedules import SCHEDULED_FOR
from outbox_relay.settings.secrets import (
    HEADERS,
    SECRETS,
    Headers,
    HeaderValue,
    SigningSecret,
    further_header,
    read_headers,
    read_secrets,
    repeated_headers,
)
from outbox_relay.sinks.settings import SinkSettings

OWN_MEANING = frozenset((408, 410, 425, 429, 502, 503, 504, *range(520, 528), 530))
"""Statuses that can be neither permanent nor accepted: the receiver is busy, gone or behind a gateway that says so."""


def _network(value: object) -> object:
    if isinstance(value, Network):
        return value
    text = value if isinstance(value, str) else ""
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError('should be a network such as "10.1.0.0/16" or an address') from None
    if ip_network(text.partition("/")[0]).network_address != network.network_address:
        raise ValueError(f'has bits set after its length: the network is "{network}"')
    return network


def _status(first: int, kind: str) -> AfterValidator:
    def check(status: int) -> int:
        if not first <= status <= 599:
            raise ValueError(f"is {status}, should be {first} to 599: the statuses of failures")
        if status in OWN_MEANING:
            raise ValueError(f"is {status}, which has a fixed meaning and cannot be {kind}")
        return status

    return AfterValidator(check)


def _proxy(url: str) -> str:
    proxy_endpoint(url)
    return url


def _forwarded(name: str) -> str:
    lower = name.lower()
    return lower if lower == SCHEDULED_FOR else further_header(name).lower()


ForwardedName: TypeAlias = Annotated[str, AfterValidator(_forwarded)]
Networks: TypeAlias = Annotated[tuple[Annotated[Network, BeforeValidator(_network)], ...], Field(max_length=256)]


class WebhookSettings(SinkSettings):
    """A sink that posts each event to a URL, signed."""

    allow_http: bool = False
    """Accept a plain http:// URL."""
    allow_networks: Networks = ()
    """Private networks that may be addressed, such as "10.1.0.0/16"."""
    deny_networks: Networks = ()
    """Further networks that are never addressed; they take precedence over allow_networks."""
    url: str = Field(repr=False)
    """The URL that events are posted to: https, without credentials."""
    secrets: tuple[SigningSecret, ...] = Field(default=(), max_length=SECRETS)
    """Secrets, 1 to 16: all sign until their end, so that receivers can change over one after the other."""
    secrets_file: Annotated[Path | None, excludes("secrets")] = Field(default=None, validate_default=True)
    """A file with a secret in each line, instead of secrets; read at start and on SIGHUP."""
    timeout_seconds: Number = Field(default=15.0, gt=0, le=60)
    """Longest time for one request from connecting to the end of the answer, in seconds, above 0 and at most 60."""
    max_in_flight: Count = Field(default=64, ge=1, le=4096)
    """Most concurrent requests of one relay, 1 to 4096."""
    forward_headers: tuple[ForwardedName, ...] = Field(default=(), max_length=HEADERS)
    """Names of the event's own headers that are passed on, at most 32; none by default."""
    headers: Headers = Field(default_factory=dict, max_length=HEADERS, repr=False)
    """Headers added to each request, at most 32: text, { env = "NAME" } or { file = "PATH" }."""
    accepted_statuses: tuple[Annotated[Count, _status(300, "accepted")], ...] = ()
    """Further statuses of an answer that deliver, 300 to 599, such as 409 of a receiver that already has the event."""
    permanent_statuses: tuple[Annotated[Count, _status(400, "permanent")], ...] = ()
    """Statuses of an answer that end an event at once, 400 to 599; every other failure is tried again."""
    retry_after_max_seconds: Number = Field(default=3600.0, gt=0, le=86_400)
    """Longest wait that an answer's Retry-After can ask for, in seconds, above 0 and at most 86400."""
    client_certificate: Path | None = None
    """A PEM file with the certificate that the relay presents, and those between it and its authority."""
    client_key: Annotated[Path | None, needs("client_certificate")] = None
    """A PEM file with the key of client_certificate, not encrypted; by default in the same file."""
    ca_file: Path | None = None
    """A PEM file with the authorities that receivers are verified by, instead of the system's."""
    proxy: Annotated[str, AfterValidator(_proxy)] | None = Field(default=None, repr=False)
    """A forward proxy, "http://HOST:PORT", for all connections (CONNECT); it resolves names and judges addresses."""
    proxy_authorization_file: Annotated[Path | None, needs("proxy")] = None
    """A file with the value of proxy-authorization; read at start and on SIGHUP."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str, info: ValidationInfo) -> str:
        allowed = info.data.get("allow_networks", EVERYWHERE)
        refused = info.data.get("deny_networks", ())
        check_url(value, allow_http=info.data.get("allow_http", True), allowed=allowed, refused=refused)
        return value

    @field_validator("secrets_file")
    @classmethod
    def _some_secrets(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None and info.data.get("secrets") == ():
            required = "is required, or secrets_file: requests are signed"
            raise InvalidSetting([Problem(("secrets",), required)], in_table=True)
        return value

    @field_validator("headers")
    @classmethod
    def _are_distinct(cls, value: Headers, info: ValidationInfo) -> Headers:
        if wrong := [*repeated_headers(value, info.data.get("forward_headers", ()))]:
            raise InvalidSetting(wrong)
        return value

    @field_validator("permanent_statuses")
    @classmethod
    def _are_not_accepted(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if both := sorted({*value} & {*info.data.get("accepted_statuses", ())}):
            raise ValueError(f"has {both[0]}, which accepted_statuses has too")
        return value

    @field_validator("forward_headers", "accepted_statuses", "permanent_statuses")
    @classmethod
    def _without_repeats(cls, value: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(dict.fromkeys(value))

    def signing_keys(self) -> tuple[SigningKey, ...]:
        """Return the keys that sign requests, from ``secrets_file`` at each call if that is set.

        Blocks while a small file is read. Raises ConfigurationError, without any of its content, if it cannot be used.
        """
        secrets = self.secrets if self.secrets_file is None else read_secrets(self.secrets_file)
        return tuple(secret.key() for secret in secrets)

    def request_headers(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the values of ``headers``; see :func:`read_headers`."""
        return read_headers(self.headers, environ)

    def proxy_endpoint(self) -> tuple[str, int] | None:
        """Return host and port of ``proxy``, or None without one."""
        return None if self.proxy is None else proxy_endpoint(self.proxy)

    def proxy_authorization(self) -> str | None:
        """Return the content of ``proxy_authorization_file``, or None; blocks and raises as :meth:`request_headers`."""
        if self.proxy_authorization_file is None:
            return None
        try:
            return HeaderValue.model_validate({"file": str(self.proxy_authorization_file)}).read({})
        except ValueError as error:
            raise ConfigurationError(f"proxy_authorization_file {error}") from None

    def denied(self, address: Address | str) -> str | None:
        """Return in a word or two why this sink does not connect to ``address``, or None if it may.

        It is asked for every address of the host. Raises ValueError if the text is not an address.
        """
        return denied(address, self.allow_networks, self.deny_networks)
