"""Redaction: the names of secret settings, and texts without their values. Pure."""

from __future__ import annotations

import re

LONG = 8
"""Least number of characters of a secret that is found inside a longer word, which cannot be there by chance."""

_BEGIN = r"(?:(?<![^\W_])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[bfnrt])|(?<=\\u[0-9A-Fa-f]{4})|(?<=\\x[0-9A-Fa-f]{2}))"
"""The beginning of a word. An escaped character before it seems to end with a letter or digit of the word."""
_END = r"(?![^\W_])"
_SECRET = ("password", "secret", "pem", "jaas", "token", "private", "passphrase", "sasl.oauthbearer.config", "ssl.key")
_NOT_SECRET = (".location", ".url", "ca.pem", "certificate.pem")


def without(text: str, value: str, shown: str, *, anywhere: bool) -> str:
    """Return ``text`` with ``shown`` in place of ``value`` where that is a whole word, or several.

    ``anywhere``: a value of at least ``LONG`` characters is replaced inside longer words too.
    """
    if value not in text:  # a pattern of a whole payload would take seconds
        return text
    if anywhere and len(value) >= LONG:
        return text.replace(value, shown)
    begin, end = _BEGIN if value[:1].isalnum() else "", _END if value[-1:].isalnum() else ""
    return re.sub(begin + re.escape(value) + end, lambda _: shown, text)


def may_hold_secret(name: str) -> bool:
    """Return True if the value of the setting ``name`` may be or contain a secret, such as one that names a file."""
    return any(part in name for part in _SECRET)


def holds_secret(name: str) -> bool:
    """Return True if the value of the setting ``name`` is a secret."""
    return may_hold_secret(name) and not name.endswith(_NOT_SECRET)
