"""Signing secrets of webhooks, as Standard Webhooks writes them, and nothing else."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, SecretStr, field_validator, model_validator

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.formats import signatures
from outbox_relay.settings.fields import Section

SECRETS = 16
"""Secrets of one webhook, at most: each adds a signature to every request."""
FILE_BYTES = 64 * 1024
"""Largest file of secrets, in bytes."""


class SigningSecret(Section):
    """A secret that requests are signed with; in the file a string, or a table with its end."""

    secret: SecretStr
    """"whsec_" and the base64 of 24 to 64 random bytes, or "whsk_" and that of an Ed25519 seed."""
    until: AwareDatetime | None = None
    """When it no longer signs, a date and time with an offset; left out: never."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"secret": value} if isinstance(value, str | SecretStr) else value

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: SecretStr) -> SecretStr:
        signatures.key(value.get_secret_value())
        return value

    def key(self) -> signatures.Key:
        """What signs with it, until its end."""
        return signatures.key(self.secret.get_secret_value(), self.until)


def read_secrets(path: Path) -> tuple[SigningSecret, ...]:
    """The secrets in the file at ``path``, one a line; empty lines and those that begin with ``#`` are passed over.

    Behind a secret may stand, after a blank, when it no longer signs: a date and time with an offset. Raises
    Misconfigured, without any of its content, when the file cannot be read, holds no secret or a line that is none.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
        lines = content.decode("ascii").splitlines()
    except OSError as error:
        raise Misconfigured(f"secrets_file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Misconfigured(f"secrets_file {path}: holds characters beyond ASCII") from None
    if len(content) > FILE_BYTES:
        raise Misconfigured(f"secrets_file {path}: is larger than {FILE_BYTES} bytes")
    found: list[SigningSecret] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(_secret_of(line))
        except ValueError as error:
            raise Misconfigured(f"secrets_file {path}: line {number}: {error}") from None
    if not 1 <= len(found) <= SECRETS:
        raise Misconfigured(f"secrets_file {path}: holds {len(found)} secrets, should hold 1 to {SECRETS}, one a line")
    return tuple(found)


def _secret_of(line: str) -> SigningSecret:
    text, *end = line.split(maxsplit=1)
    signatures.key(text)
    return SigningSecret(secret=SecretStr(text), until=_end(end[0].strip()) if end else None)


def _end(text: str) -> datetime:
    try:
        until = datetime.fromisoformat(text)
    except ValueError:
        until = None
    if until is None or until.utcoffset() is None:
        raise ValueError("what stands behind the secret should be its end, such as 2027-01-01T00:00:00Z")
    return until
