"""The table ``[sinks.NAME]`` with ``type = "webhook"``, its secrets, and the headers that it adds to requests."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, ValidationInfo, field_validator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import Count, Secret, Section, as_table, listed, parsed_by
from outbox_relay.formats.signatures import SigningKey, parse_key
from outbox_relay.settings.addresses import EVERYWHERE, Address, Network, Proxy, check_url, denied, parse_proxy
from outbox_relay.settings.problems import InvalidSetting, Problem
from outbox_relay.settings.schedules import SCHEDULED_FOR
from outbox_relay.sinks.settings import RequestSettings, TlsSettings

T = TypeVar("T")
TIMEOUT_MOST = 60
SECRETS = 16
"""Most secrets of one webhook: each adds a signature to every request."""
HEADERS = 32
"""Most headers of the settings, and of the event, in one request."""
VALUE_BYTES = 4096
"""Longest value, in bytes."""
TOTAL_BYTES = 16 * 1024
"""Most bytes of all names and values of the settings' headers."""
HEADER_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}"
NOT_A_NAME = "should be the name of a header: 1 to 128 letters, digits and hyphens"
OWN_MEANING = frozenset((408, 410, 425, 429, 502, 503, 504, *range(520, 528), 530))
"""Statuses that can be neither permanent nor accepted: the receiver is busy, gone or behind a gateway that says so."""

_RESERVED = re.compile(
    r"accept(-encoding)?|connection|cookie|expect|host|idempotency-key|keep-alive|te|traceparent|trailer|upgrade|"
    r"transfer-encoding|user-agent|(webhook|outbox|content|proxy|ce|x-amz|x-goog|x-envoy|x-forwarded)-.*"
)


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


def further_header(name: str) -> str:
    """Return ``name`` if it can be the name of a further header. Raises ValueError otherwise."""
    if not re.fullmatch(HEADER_NAME, name):
        raise ValueError(NOT_A_NAME)
    if _RESERVED.fullmatch(name.lower()):
        raise ValueError("is a header that the relay or the connection sets itself")
    return name


def _forwarded(name: str) -> str:
    lower = name.lower()
    return lower if lower == SCHEDULED_FOR else further_header(name).lower()


def _header_value(value: str) -> str:
    if len(value) > VALUE_BYTES:
        raise ValueError(f"holds more than {VALUE_BYTES} bytes")
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", value):
        raise ValueError("should hold visible ASCII characters, with spaces only between them")
    return value


class SigningSecret(Section):
    """A secret that requests are signed with; in the file the secret itself, or a table with its end."""

    secret: Annotated[Secret, parsed_by(parse_key)]
    """"whsec_" and the base64 of 24 to 64 random bytes, or "whsk_" and that of an Ed25519 seed."""
    until: AwareDatetime | None = None
    """Date and time with an offset from which on it does not sign; by default it always signs."""

    def key(self) -> SigningKey:
        """Return the key that signs, until the secret's end. Blocks and raises as ``Secret.read``."""
        return self.secret.read(lambda text: parse_key(text, self.until))


def _with_end(value: object) -> object:
    """Return the table of a secret that stands alone, without its end."""
    table = as_table(value)
    alone = isinstance(value, str) or (table is value and {"secret", "until"}.isdisjoint(table))
    return {"secret": value} if alone else value


def _some(secrets: tuple[SigningSecret, ...]) -> tuple[SigningSecret, ...]:
    if not 1 <= len(secrets) <= SECRETS:
        raise ValueError(f"has {len(secrets)} secrets, should have 1 to {SECRETS}")
    return secrets


Networks: TypeAlias = Annotated[
    tuple[Annotated[Network, BeforeValidator(_network)], ...], Field(max_length=256), BeforeValidator(listed)
]
SecretWithEnd: TypeAlias = Annotated[
    SigningSecret, BeforeValidator(_with_end, json_schema_input_type=Secret | SigningSecret)
]
Secrets: TypeAlias = Annotated[tuple[SecretWithEnd, ...], BeforeValidator(listed), AfterValidator(_some)]
Headers: TypeAlias = dict[Annotated[str, AfterValidator(further_header)], Annotated[Secret, parsed_by(_header_value)]]


class WebhookSettings(RequestSettings, TlsSettings):
    """A sink that posts each event to a URL, signed."""

    type: Literal["webhook"]  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, and frozen
    """The kind of sink."""
    allow_http: bool = False
    """Accept a plain http:// URL."""
    allow_networks: Networks = ()
    """Private networks that may be addressed, such as "10.1.0.0/16"."""
    deny_networks: Networks = ()
    """Further networks that are never addressed; they take precedence over allow_networks."""
    url: str = Field(repr=False)
    """The URL that events are posted to: https, without credentials."""
    secrets: Secrets
    """Secrets, 1 to 16: all sign until their end, so that receivers can change over one after the other."""
    forward_headers: Annotated[
        tuple[Annotated[str, AfterValidator(_forwarded)], ...], Field(max_length=HEADERS), BeforeValidator(listed)
    ] = ()
    """Names of the event's own headers that are passed on, at most 32; none by default."""
    headers: Headers = Field(default_factory=dict, max_length=HEADERS)
    """Headers added to each request, at most 32: names and values, which may be secrets."""
    accepted_statuses: tuple[Annotated[Count, _status(300, "accepted")], ...] = ()
    """Further statuses of an answer that deliver, 300 to 599, such as 409 of a receiver that already has the event."""
    permanent_statuses: tuple[Annotated[Count, _status(400, "permanent")], ...] = ()
    """Statuses of an answer that end an event at once, 400 to 599; every other failure is tried again."""
    proxy: Annotated[Secret, parsed_by(parse_proxy)] | None = None
    """A forward proxy, "http://USER:PASSWORD@HOST:PORT", for all connections; it resolves names."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str, info: ValidationInfo) -> str:
        allowed = info.data.get("allow_networks", EVERYWHERE)
        refused = info.data.get("deny_networks", ())
        check_url(value, allow_http=info.data.get("allow_http", True), allowed=allowed, refused=refused)
        return value

    @field_validator("timeout_seconds")
    @classmethod
    def _is_short(cls, value: float) -> float:
        if value > TIMEOUT_MOST:
            raise ValueError(f"should be at most {TIMEOUT_MOST}, for a webhook")
        return value

    @field_validator("headers")
    @classmethod
    def _are_distinct(cls, value: Headers, info: ValidationInfo) -> Headers:
        taken = dict.fromkeys(info.data.get("forward_headers", ()), "is in forward_headers too: remove one of the two")
        wrong: list[Problem] = []
        for name in value:
            if name.lower() in taken:
                wrong.append(Problem((name,), taken[name.lower()]))
            taken[name.lower()] = "appears twice: header names ignore case"
        if wrong:
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
        """Return the keys that sign requests. Blocks while small files are read.

        Raises ConfigurationError, with the place and nothing of any secret, if one cannot be used; so do the other
        methods that read secrets.
        """
        return tuple(_read(f"secrets[{n}]", each.key) for n, each in enumerate(self.secrets))

    def request_headers(self) -> dict[str, str]:
        """Return the values of ``headers`` by their names in lower case. Blocks and raises as ``signing_keys``."""
        found = {
            name.lower(): _read(f"headers.{name}", lambda value=value: value.read(_header_value))
            for name, value in self.headers.items()
        }
        total = sum(len(name) + len(value) for name, value in found.items())
        if total > TOTAL_BYTES:
            raise ConfigurationError(f"headers: hold {total} bytes together, should hold at most {TOTAL_BYTES}")
        return found

    def proxy_endpoint(self) -> tuple[str, int] | None:
        """Return host and port of ``proxy``, or None without one. Blocks and raises as ``signing_keys``."""
        found = self._proxy()
        return found and (found.host, found.port)

    def proxy_authorization(self) -> str | None:
        """Return the value of proxy-authorization, or None. Blocks and raises as ``signing_keys``."""
        found = self._proxy()
        return found and found.credentials and f"Basic {b64encode(found.credentials.encode()).decode()}"

    def _proxy(self) -> Proxy | None:
        secret = self.proxy
        return None if secret is None else _read("proxy", lambda: secret.read(parse_proxy))

    def denied(self, address: Address | str) -> str | None:
        """Return in a word or two why this sink does not connect to ``address``, or None if it may.

        It is asked for every address of the host. Raises ValueError if the text is not an address.
        """
        return denied(address, self.allow_networks, self.deny_networks)


def _read(setting: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ValueError as error:
        raise ConfigurationError(f"{setting}: {error}") from None
