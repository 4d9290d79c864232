"""The table ``[sinks.NAME]`` with ``type = "webhook"``."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.settings import raw
from outbox_relay.settings.addresses import Address, Network, denied
from outbox_relay.settings.destination import check_url
from outbox_relay.settings.every_sink import EverySink
from outbox_relay.settings.fields import Count, Number
from outbox_relay.settings.problems import Problem, Wrong
from outbox_relay.settings.secrets import SECRETS, SigningSecret, read_secrets

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


class WebhookSink(EverySink):
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
