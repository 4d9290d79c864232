"""Passwords of the page's tests: a quick hash, and the header that has a name and a password."""

from __future__ import annotations

from base64 import b64encode
from hashlib import scrypt


def quick_hash(password: str) -> str:
    """Return a hash that is found out in no time, and could be broken in as much."""
    found = scrypt(password.encode(), salt=b"salt", n=2, r=1, p=1, dklen=32)
    return f"scrypt$2$1$1${b64encode(b'salt').decode()}${b64encode(found).decode()}"


def basic(name: str, password: str) -> dict[str, str]:
    """Return the header of HTTP's Basic authentication."""
    return {"authorization": f"Basic {b64encode(f'{name}:{password}'.encode()).decode()}"}
