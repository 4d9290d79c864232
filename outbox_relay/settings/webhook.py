"""The table ``[sinks.NAME]`` with ``type = "webhook"``."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.formats.signatures import Key
from outbox_relay.settings import raw
from outbox_relay.settings.addresses import Address, Network, denied
from outbox_relay.settings.destination import EVERYWHERE, check_url, proxy_endpoint
from outbox_relay.settings.every_sink import SinkSettings
from outbox_relay.settings.fields import Count, Number
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.request_headers import (
    HEADERS,
    HeaderValue,
    header_problems,
    name_refusal,
    read_file,
    read_headers,
)
from outbox_relay.settings.secrets import SECRETS, SigningSecret, read_secrets

OWN_MEANING = frozenset((408, 410, 425, 429, 502, 503, 504))
"""Statuses that say when to come back, or that nobody is there: they cannot be permanent."""


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


class WebhookSettings(SinkSettings):
    """A sink that posts each event to a URL, signed."""

    type: Literal["webhook"]
    """The kind of sink."""
    allow_http: bool = False
    """Whether a plain http:// URL is taken."""
    allow_networks: tuple[Annotated[Network, BeforeValidator(_network)], ...] = Field(default=(), max_length=256)
    """Private networks that may be addressed, such as "10.1.0.0/16"."""
    deny_networks: tuple[Annotated[Network, BeforeValidator(_network)], ...] = Field(default=(), max_length=256)
    """Further networks that are never addressed, such as "203.0.114.0/24"; they count for more than allow_networks."""
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
    forward_headers: tuple[str, ...] = Field(default=(), max_length=HEADERS)
    """Names of the event's own headers that are passed on, at most 32, in lower case; none by default."""
    headers: dict[str, HeaderValue] = Field(default_factory=dict, repr=False)
    """Headers added to each request, at most 32: text, { env = "NAME" } or { file = "PATH" }, which are read at start
    and on SIGHUP."""
    permanent_statuses: tuple[Count, ...] = (400,)
    """Statuses of an answer that end an event at once, 400 to 599; every other failure is tried again."""
    retry_after_max_seconds: Number = Field(default=3600.0, gt=0, le=86_400)
    """Longest wait that an answer's Retry-After can ask for, in seconds, above 0 and at most 86400."""
    client_certificate: Path | None = None
    """A PEM file with the certificate that the relay shows, and those between it and its authority; read at start and
    on SIGHUP."""
    client_key: Path | None = None
    """A PEM file with the key of client_certificate, not encrypted; left out: it stands in the same file."""
    ca_file: Path | None = None
    """A PEM file with the authorities that receivers are trusted by, instead of the system's."""
    proxy: str | None = Field(default=None, repr=False)
    """A forward proxy, "http://HOST:PORT", that all connections go through (CONNECT); it looks names up and judges
    addresses instead of the relay."""
    proxy_authorization_file: Path | None = None
    """A file with what the proxy is shown as proxy-authorization; read at start and on SIGHUP."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str, info: ValidationInfo) -> str:
        allowed = info.data.get("allow_networks", EVERYWHERE)
        refused = info.data.get("deny_networks", ())
        check_url(value, allow_http=info.data.get("allow_http", True), allowed=allowed, refused=refused)
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
        wrong = [Problem((n,), text) for n, name in enumerate(value) if (text := name_refusal(name)) is not None]
        if wrong:
            raise Wrong(wrong)
        return tuple(dict.fromkeys(name.lower() for name in value))

    @field_validator("headers")
    @classmethod
    def _may_be_added(cls, value: dict[str, HeaderValue], info: ValidationInfo) -> dict[str, HeaderValue]:
        if wrong := header_problems(value, info.data.get("forward_headers", ())):
            raise Wrong(wrong)
        return value

    @field_validator("permanent_statuses")
    @classmethod
    def _can_be_permanent(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        wrong = [Problem((n,), text) for n, status in enumerate(value) if (text := _status_refusal(status)) is not None]
        if wrong:
            raise Wrong(wrong)
        return tuple(dict.fromkeys(value))

    @field_validator("proxy")
    @classmethod
    def _is_a_proxy(cls, value: str | None) -> str | None:
        if value is not None:
            proxy_endpoint(value)
        return value

    @field_validator("proxy_authorization_file")
    @classmethod
    def _belongs_to_a_proxy(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("proxy", value) is None:
            raise ValueError("needs proxy, which it is for")
        return value

    @field_validator("client_key")
    @classmethod
    def _belongs_to_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("client_certificate", value) is None:
            raise ValueError("needs client_certificate, to which it belongs")
        return value

    def signing_secrets(self) -> tuple[SigningSecret, ...]:
        """The secrets, from ``secrets_file`` at each call if that is set.

        In the file each line is a secret; empty lines and those that begin with ``#`` are passed over. Blocks for
        as long as reading a small file takes. Raises Misconfigured, without any of its content, when the file cannot be
        read, holds no secret or a line that is none.
        """
        return self.secrets if self.secrets_file is None else read_secrets(self.secrets_file)

    def signing_keys(self) -> tuple[Key, ...]:
        """What requests are signed with; blocks and raises as :meth:`signing_secrets`."""
        return tuple(secret.key() for secret in self.signing_secrets())

    def request_headers(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The values of ``headers`` by their names in lower case, read at each call from ``environ`` and files.

        Blocks for as long as reading small files takes. Raises Misconfigured, with the names and sources and without
        any value, when one cannot be read or cannot be sent.
        """
        return read_headers(self.headers, environ)

    def proxy_endpoint(self) -> tuple[str, int] | None:
        """Host and port of ``proxy``; nothing without one."""
        return None if self.proxy is None else proxy_endpoint(self.proxy)

    def proxy_authorization(self) -> str | None:
        """What ``proxy_authorization_file`` holds, read at each call; blocks and raises as :meth:`request_headers`."""
        path = self.proxy_authorization_file
        return None if path is None else read_file("proxy_authorization_file", path)

    def denied(self, address: Address | str) -> str | None:
        """Why this sink does not connect to ``address``, in a word or two; nothing when it may.

        To be asked for every address that the host's name stands for. Raises ValueError when the text is no address.
        """
        return denied(address, self.allow_networks, self.deny_networks)


def _status_refusal(status: int) -> str | None:
    if not 400 <= status <= 599:
        return f"is {status}, should be 400 to 599: the statuses of failures"
    if status in OWN_MEANING:
        return f"is {status}, which has a meaning of its own: only a person or time can end what it says"
    return None
