"""Signing secrets of webhooks: ``whsec_`` and standard base64, as Standard Webhooks writes them, and nothing else."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from pydantic import AwareDatetime, SecretStr, field_validator, model_validator

from outbox_relay.errors import Misconfigured
from outbox_relay.settings.fields import Section

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of a secret is none
SECRETS = 16
"""Secrets of one webhook, at most: each adds a signature to every request."""


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


def read_secrets(path: Path) -> tuple[SigningSecret, ...]:
    """The secrets in the file at ``path``, one a line; empty lines and those that begin with ``#`` are passed over.

    Raises Misconfigured, without any of its content, when the file cannot be read, holds none or a line that is none.
    """
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
