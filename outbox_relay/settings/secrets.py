"""Secrets, as Standard Webhooks writes them, and the headers that a webhook adds to its requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, AwareDatetime, Field, SecretStr, model_validator

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.fields import Section, as_table, read_text
from outbox_relay.formats import signatures
from outbox_relay.settings.problems import Problem

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

_RESERVED = re.compile(
    r"accept(-encoding)?|connection|cookie|expect|host|idempotency-key|keep-alive|te|traceparent|trailer|upgrade|"
    r"transfer-encoding|user-agent|(webhook|outbox|content|proxy|ce|x-amz|x-goog|x-envoy|x-forwarded)-.*"
)


def _checked_secret(secret: SecretStr) -> SecretStr:
    signatures.parse_key(secret.get_secret_value())
    return secret


class SigningSecret(Section):
    """A secret that requests are signed with; in the file a string, or a table with its end."""

    secret: Annotated[SecretStr, AfterValidator(_checked_secret)]
    """"whsec_" and the base64 of 24 to 64 random bytes, or "whsk_" and that of an Ed25519 seed."""
    until: AwareDatetime | None = None
    """Date and time with an offset from which on it does not sign; by default it always signs."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"secret": value} if isinstance(value, str) else value

    def key(self) -> signatures.SigningKey:
        """Return the key that signs, until the secret's end."""
        return signatures.parse_key(self.secret.get_secret_value(), self.until)


def read_secrets(path: Path) -> tuple[SigningSecret, ...]:
    """Return the secrets in the file at ``path``, one per line, each with its end after a blank if it has one.

    Empty lines and lines that begin with ``#`` are ignored. Raises ConfigurationError, without any content, if the file
    cannot be read or holds no secret or a line that is not one.
    """
    number, found = 0, list[SigningSecret]()
    try:
        for line in read_text(path).splitlines():
            number += 1
            if line.strip() and not line.lstrip().startswith("#"):
                found.append(_secret(*line.split(maxsplit=1)))
    except ValueError as error:
        raise ConfigurationError(f"secrets_file {path}: {f'line {number}: ' if number else ''}{error}") from None
    if not 1 <= len(found) <= SECRETS:
        raise ConfigurationError(
            f"secrets_file {path}: holds {len(found)} secrets, should hold 1 to {SECRETS}, one a line"
        )
    return tuple(found)


def _secret(text: str, end: str = "") -> SigningSecret:
    signatures.parse_key(text)
    try:
        return SigningSecret.model_validate({"secret": text, "until": end.strip() or None})
    except ValueError:
        raise ValueError("the text after the secret should be its end, such as 2027-01-01T00:00:00Z") from None


def further_header(name: str) -> str:
    """Return ``name`` if it can be the name of a further header. Raises ValueError otherwise."""
    if not re.fullmatch(HEADER_NAME, name):
        raise ValueError(NOT_A_NAME)
    if _RESERVED.fullmatch(name.lower()):
        raise ValueError("is a header that the relay or the connection sets itself")
    return name


class HeaderValue(Section):
    """The value of a header: in the file text, or a table that names its source."""

    text: SecretStr | None = Field(default=None, repr=False)
    """The value itself."""
    env: str | None = Field(default=None, repr=False, min_length=1)
    """The environment variable that holds it."""
    file: Path | None = Field(default=None, repr=False)
    """The file that holds it, with or without a line break at its end."""

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if isinstance(value, HeaderValue):
            return value
        if isinstance(value, str):
            return {"text": SecretStr(_checked(value))}
        source = as_table(value)
        if source.keys() not in ({"env"}, {"file"}) or not all(isinstance(name, str) for name in source.values()):
            raise ValueError('should be text, or a table { env = "NAME" } or { file = "PATH" }')
        return source

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the value. Blocks while a small file is read.

        Raises ValueError, with the source and without the value, if there is none or a header cannot hold it.
        """
        if self.text is not None:
            return self.text.get_secret_value()
        try:
            if self.file is not None:
                return _checked(read_text(self.file).removesuffix("\n").removesuffix("\r"))
            return _checked(environ[self.env or ""])
        except KeyError:
            raise ValueError(f"the variable {self.env} is not set") from None
        except ValueError as error:
            raise ValueError(f"{self.file or f'the variable {self.env}'}: {error}") from None


def _checked(value: str) -> str:
    if len(value) > VALUE_BYTES:
        raise ValueError(f"holds more than {VALUE_BYTES} bytes")
    if not re.fullmatch(r"[!-~](?:[ -~]*[!-~])?", value):
        raise ValueError("should hold visible ASCII characters, with spaces only between them")
    return value


Headers: TypeAlias = dict[Annotated[str, AfterValidator(further_header)], HeaderValue]


def repeated_headers(headers: Headers, forwarded: Iterable[str]) -> Iterator[Problem]:
    """Yield the names in ``headers`` that appear twice, or among those ``forwarded`` from the events."""
    taken = dict.fromkeys(forwarded, "is in forward_headers too: remove it from one of the two")
    for name in headers:
        if name.lower() in taken:
            yield Problem((name,), taken[name.lower()])
        taken[name.lower()] = "appears twice: header names ignore case"


def read_headers(headers: Headers, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of ``headers`` by their names in lower case, read from ``environ`` and files at each call.

    Blocks while small files are read.

    Raises ConfigurationError, with the names and sources and without any value, if one cannot be read or sent, or all
    together are too long.
    """
    found: dict[str, str] = {}
    faults: list[str] = []
    for name, value in headers.items():
        try:
            found[name.lower()] = value.read(environ)
        except ValueError as error:
            faults.append(f"headers.{name}: {error}")
    total = sum(len(name) + len(value) for name, value in found.items())
    if total > TOTAL_BYTES:
        faults.append(f"headers: names and values hold {total} bytes together, should hold at most {TOTAL_BYTES}")
    if faults:
        raise ConfigurationError("; ".join(faults))
    return found
