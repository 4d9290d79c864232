"""What a destination said, made fit for people: harmless characters, none of our secrets, nothing of the payload."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

ANSWER_CHARS = 1000
"""Longest text that is kept of an answer, in characters."""
SECRET_CHARS = 4
"""Shortest text that is taken for a secret; shorter ones would be found everywhere."""
WORD_CHARS = 8
"""A word of a secret that is at least so long is a secret by itself: the token behind ``Bearer``."""
ECHO_BYTES = 16
"""So many bytes of the payload in a row, or all of a shorter one, make an answer an echo."""
STEP = 8
"""What was sent is compared at every STEP-th byte: a run of ECHO_BYTES covers one whole window of the rest."""
COMPARED_BYTES = 256 * 1024
"""Most of what was sent that is compared; of answers to more nothing is kept."""
SEGMENT_CHARS = 16
"""A part of a URL's path that is at least so long may be a token."""
REDACTED = "[redacted]"
ECHO = "[left out: it repeats the payload]"
TOO_LARGE = "[left out: the payload is too large to look for in it]"

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])|\x9b[0-?]*[ -/]*[@-~]?")
_SIGNING_SECRET = re.compile(r"whs(?:ec|k)_[A-Za-z0-9+/=_-]*")
_HEXADECIMAL = re.compile(r"%[0-9A-F]{2}")
_WINDOW = ECHO_BYTES - STEP + 1


def secrets_of_url(url: str) -> frozenset[str]:
    """What in ``url`` may be a token: its path with the query, the values of the query, long parts of the path."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    found = {target, parts.query, *(value for _, value in parse_qsl(parts.query, keep_blank_values=True))}
    found |= {segment for segment in parts.path.split("/") if len(segment) >= SEGMENT_CHARS}
    return frozenset(found)


def readable(prefix: bytes, secrets: Iterable[str], sent: bytes) -> str | None:
    """The beginning of an answer as one line of at most ``ANSWER_CHARS`` characters; nothing when it is empty.

    ``secrets`` are texts that must not show, in whatever escaping answers repeat things; those shorter than
    ``SECRET_CHARS`` are none. ``sent`` is what the answer may repeat: if it does, nothing of the answer is kept. Small
    pieces, below ``ECHO_BYTES``, cannot be told from words that any answer holds.
    """
    if not prefix:
        return None
    if len(sent) > COMPARED_BYTES:
        return TOO_LARGE
    if echoes(prefix, sent):
        return ECHO
    text = _ESCAPE.sub("", prefix.decode("utf-8", "replace"))
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    text = _without(text, secrets)
    return text if len(text) <= ANSWER_CHARS else text[: ANSWER_CHARS - 1] + "…"


def echoes(prefix: bytes, sent: bytes) -> bool:
    """Whether ``prefix`` holds ``ECHO_BYTES`` bytes of ``sent`` in a row, or the whole of it when that is shorter.

    Takes time linear in both, whatever they hold.
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


def _without(text: str, secrets: Iterable[str]) -> str:
    known = {secret for secret in secrets if len(secret) >= SECRET_CHARS}
    known |= {word for secret in known for word in secret.split() if len(word) >= WORD_CHARS}
    written = {form for secret in known for form in _forms(secret)}
    for form in sorted(written, key=len, reverse=True):
        text = text.replace(form, REDACTED)
    # The answer may have been cut in the middle of one.
    cut = max((_cut(text, form) for form in written), default=0)
    text = text[: len(text) - cut] + REDACTED if cut else text
    return _SIGNING_SECRET.sub(REDACTED, text)


def _cut(text: str, form: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``form``."""
    return next((n for n in range(len(form) - 1, SECRET_CHARS - 1, -1) if text.endswith(form[:n])), 0)


def _forms(secret: str) -> Iterable[str]:
    """``secret`` as answers may write it: as it is, in JSON, in HTML, in a URL."""
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
