"""Make a response fit for people: harmless characters, no secrets, nothing of the payload."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

from outbox_relay.domain.redaction import without

ANSWER_CHARS = 1000
"""Longest text that is kept of a response, in characters."""
SECRET_CHARS = 4
"""Shortest text that is treated as a secret; shorter ones would be found everywhere."""
WORD_CHARS = 8
"""Shortest word of a secret that is a secret by itself, such as the token after ``Bearer``."""
ECHO_BYTES = 16
"""Bytes of the payload in a row, or all of a shorter one, that make a response an echo."""
STEP = 8
"""The payload is compared at every STEP-th byte: a run of ECHO_BYTES covers one whole window."""
COMPARED_BYTES = 256 * 1024
"""Longest payload that is compared; nothing is kept of a response to a longer one."""
SEGMENT_CHARS = 16
"""Shortest segment of a URL's path that may be a token."""
REDACTED = "[redacted]"
ECHO = "[left out: it repeats the payload]"
TOO_LARGE = "[left out: the payload is too large to look for in it]"

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])|\x9b[0-?]*[ -/]*[@-~]?")
_SIGNING_SECRET = re.compile(r"whs(?:ec|k)_[A-Za-z0-9+/=_-]*")
_HEXADECIMAL = re.compile(r"%[0-9A-F]{2}")
_WINDOW = ECHO_BYTES - STEP + 1


def secrets_of_url(url: str) -> frozenset[str]:
    """Return the parts of ``url`` that may be tokens: path and query, the query's values, long segments of the path."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    found = {target, parts.query, *(value for _, value in parse_qsl(parts.query, keep_blank_values=True))}
    found |= {segment for segment in parts.path.split("/") if len(segment) >= SEGMENT_CHARS}
    return frozenset(found)


def url_without_secrets(url: str) -> str:
    """Return scheme, host and port of ``url``. Path and query, which may hold tokens, are replaced by ``REDACTED``."""
    parts = urlsplit(url)
    target = "/" if parts.path in ("", "/") and not parts.query else "/REDACTED"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{target}"


def readable(
    prefix: bytes, secrets: Iterable[str], sent: bytes, *, personal: Iterable[str] = (), cut: bool = False
) -> str | None:
    """Return the beginning of a response as one line of at most ``ANSWER_CHARS`` characters, or None when it is empty.

    ``secrets`` are removed in every escaping in which responses repeat them, and ``personal`` values, such as a key,
    where they stand as a whole word. Those shorter than ``SECRET_CHARS`` are ignored. With ``cut`` the response goes
    on, so that the beginning of such a value at its end is removed too.

    Nothing is kept of a response that repeats ``sent``. Pieces shorter than ``ECHO_BYTES`` are not noticed: any
    response may hold them.
    """
    if not prefix:
        return None
    if len(sent) > COMPARED_BYTES:
        return TOO_LARGE
    if echoes(prefix, sent):
        return ECHO
    text = _ESCAPE.sub("", prefix.decode("utf-8", "replace"))
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    secrets = list(secrets)
    words = [word for secret in secrets for word in secret.split() if len(word) >= WORD_CHARS]
    text = _without(text, _forms_of([*secrets, *words]), _forms_of(personal), cut=cut)
    return text if len(text) <= ANSWER_CHARS else text[: ANSWER_CHARS - 1] + "…"


def echoes(prefix: bytes, sent: bytes) -> bool:
    """Return whether ``prefix`` holds ``ECHO_BYTES`` bytes of ``sent`` in a row, or all of a shorter one.

    The time is linear in both, whatever they hold.
    """
    if len(sent) < ECHO_BYTES:
        return len(sent) >= SECRET_CHARS and sent in prefix
    short, whole = _pieces(prefix, _WINDOW), _pieces(prefix, ECHO_BYTES)
    return any(
        sent[start : start + ECHO_BYTES] in whole
        for at in range(0, len(sent) - _WINDOW + 1, STEP)
        if sent[at : at + _WINDOW] in short
        for start in range(max(0, at - STEP + 1), at + 1)
    )


def _pieces(text: bytes, size: int) -> set[bytes]:
    return {text[at : at + size] for at in range(len(text) - size + 1)}


def _forms_of(values: Iterable[str]) -> set[str]:
    return {form for value in values if len(value) >= SECRET_CHARS for form in _forms(value)}


def _without(text: str, secrets: set[str], personal: set[str], *, cut: bool) -> str:
    for form in sorted(secrets | personal, key=len, reverse=True):
        text = without(text, form, REDACTED, anywhere=form in secrets)
    if cut and (hidden := max((_cut(text, form) for form in secrets | personal), default=0)):
        text = text[: len(text) - hidden] + REDACTED
    return _SIGNING_SECRET.sub(REDACTED, text)


def _cut(text: str, form: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``form``."""
    return next((n for n in range(len(form) - 1, SECRET_CHARS - 1, -1) if text.endswith(form[:n])), 0)


def _forms(secret: str) -> Iterable[str]:
    """Return ``secret`` as responses may write it: as it is, in JSON, in HTML, in a URL."""
    in_json = json.dumps(secret)[1:-1]
    in_urls = (quote(secret), quote(secret, safe=""), quote_plus(secret))
    return {
        secret,
        in_json,
        json.dumps(secret, ensure_ascii=False)[1:-1],
        in_json.replace("/", "\\/"),
        html.escape(secret),
        *in_urls,
        *(_HEXADECIMAL.sub(lambda found: found[0].lower(), written) for written in in_urls),
    }
