"""Names of client settings whose values are secrets. Pure."""

from __future__ import annotations

_SECRET = ("password", "secret", "pem", "jaas", "token", "private", "passphrase", "sasl.oauthbearer.config", "ssl.key")
_NOT_SECRET = (".location", ".url", "ca.pem", "certificate.pem")


def may_hold_secret(name: str) -> bool:
    """Return True if the value of the setting ``name`` may be or contain a secret, such as one that names a file."""
    return any(part in name for part in _SECRET)


def holds_secret(name: str) -> bool:
    """Return True if the value of the setting ``name`` is a secret."""
    return may_hold_secret(name) and not name.endswith(_NOT_SECRET)
