"""Webhook signatures of Standard Webhooks 1.0.0. Pure: the caller passes the time.

The signed content is the id, the time of the attempt and the body: ``ID.TIMESTAMP.BODY``. A symmetric key (``whsec_``)
makes a ``v1`` signature, HMAC with SHA-256. An asymmetric one (``whsk_``) makes a ``v1a`` signature, Ed25519, which
receivers verify with the public key.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

SYMMETRIC = "whsec_"
ASYMMETRIC = "whsk_"
KEY_BYTES = (24, 64)
"""Least and greatest number of bytes of a symmetric key."""
SEED_BYTES = 32
"""Number of bytes of an Ed25519 seed, and of its public key."""

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A signing key with an optional end. Its repr shows only its version and end."""

    version: str
    """The prefix of the signature: ``v1`` or ``v1a``."""
    sign: Sign = field(repr=False)
    """The function that signs its argument."""
    until: float | None = None
    """The unix time, in seconds, from which the key no longer signs, or None."""


def parse_key(secret: str, until: datetime | None = None) -> SigningKey:
    """Return the key in ``secret``, which signs until ``until``.

    A symmetric key is ``whsec_`` and the base64 of 24 to 64 bytes. An asymmetric one is ``whsk_`` and the base64 of 32
    bytes, the seed, or of 64, the seed and its public key. The base64 is standard and padded.

    Raises ValueError, without repeating the secret, for any other text.
    """
    end = None if until is None else until.timestamp()
    if secret.startswith(SYMMETRIC):
        return SigningKey("v1", _hmac(_decoded(secret, SYMMETRIC)), end)
    if secret.startswith(ASYMMETRIC):
        return SigningKey("v1a", _ed25519(_decoded(secret, ASYMMETRIC)), end)
    raise ValueError(f"should be {SYMMETRIC} followed by the base64 of {KEY_BYTES[0]} to {KEY_BYTES[1]} random bytes")


def _decoded(secret: str, prefix: str) -> bytes:
    encoded = secret.removeprefix(prefix)
    try:
        found = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if base64.b64encode(found).decode() != encoded:
        raise ValueError(f"is not standard base64 with its padding after {prefix}")
    return found


def _hmac(secret: bytes) -> Sign:
    least, most = KEY_BYTES
    if not least <= len(secret) <= most:
        raise ValueError(f"holds {len(secret)} bytes after {SYMMETRIC}, should hold {least} to {most}")
    return lambda content: hmac.digest(secret, content, "sha256")


def _ed25519(secret: bytes) -> Sign:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed, public = secret[:SEED_BYTES], secret[SEED_BYTES:]
    if len(secret) not in (SEED_BYTES, 2 * SEED_BYTES):
        raise ValueError(
            f"holds {len(secret)} bytes after {ASYMMETRIC}, should hold {SEED_BYTES}, the seed, "
            f"or {2 * SEED_BYTES}, the seed and its public key"
        )
    private = Ed25519PrivateKey.from_private_bytes(seed)
    if public and private.public_key().public_bytes_raw() != public:
        raise ValueError(f"holds a public key after {ASYMMETRIC} that does not belong to its seed")
    return private.sign


def active_keys(keys: Sequence[SigningKey], now: float) -> list[SigningKey]:
    """Return the keys that sign at ``now``, a unix time in seconds, in their order."""
    return [found for found in keys if found.until is None or now < found.until]


def signature_header(keys: Sequence[SigningKey], uid: str, timestamp: int, body: bytes) -> str:
    """Return the value of ``webhook-signature``: a signature by each key.

    ``timestamp``, in whole unix seconds, is the value of ``webhook-timestamp``, and ``uid`` that of ``webhook-id``.
    """
    content = b"%b.%d.%b" % (uid.encode(), timestamp, body)
    return " ".join(f"{each.version},{base64.b64encode(each.sign(content)).decode()}" for each in keys)
