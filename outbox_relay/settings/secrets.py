"""Signing secrets of webhooks, as Standard Webhooks writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, SecretStr, model_validator

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.formats import signatures
from outbox_relay.settings.fields import Section, read_small_file

SECRETS = 16
"""Most secrets of one webhook: each adds a signature to every request."""


def _checked(secret: SecretStr) -> SecretStr:
    signatures.key(secret.get_secret_value())
    return secret


class SigningSecret(Section):
    """A secret that requests are signed with; in the file a string, or a table with its end."""

    secret: Annotated[SecretStr, AfterValidator(_checked)]
    """"whsec_" and the base64 of 24 to 64 random bytes, or "whsk_" and that of an Ed25519 seed."""
    until: AwareDatetime | None = None
    """When it stops signing, a date and time with an offset; by default never."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"secret": value} if isinstance(value, str) else value

    def key(self) -> signatures.Key:
        """Return the key that signs, until the secret's end."""
        return signatures.key(self.secret.get_secret_value(), self.until)


def read_secrets(path: Path) -> tuple[SigningSecret, ...]:
    """Return the secrets in the file at ``path``, one per line, each with its end after a blank if it has one.

    Empty lines and lines that begin with ``#`` are ignored. Raises Misconfigured, without any content, if the file
    cannot be read or holds no secret or a line that is not one.
    """
    number, found = 0, list[SigningSecret]()
    try:
        for line in read_small_file(path).splitlines():
            number += 1
            if line.strip() and not line.lstrip().startswith("#"):
                found.append(_secret(*line.split(maxsplit=1)))
    except ValueError as error:
        raise Misconfigured(f"secrets_file {path}: {f'line {number}: ' if number else ''}{error}") from None
    if not 1 <= len(found) <= SECRETS:
        raise Misconfigured(f"secrets_file {path}: holds {len(found)} secrets, should hold 1 to {SECRETS}, one a line")
    return tuple(found)


def _secret(text: str, end: str = "") -> SigningSecret:
    signatures.key(text)
    try:
        return SigningSecret.model_validate({"secret": text, "until": end.strip() or None})
    except ValueError:
        raise ValueError("the text after the secret should be its end, such as 2027-01-01T00:00:00Z") from None
