"""What an answer or a fault means for the event: pure, the time is given.

An answer of 200 to 299 delivers, whatever becomes of its body. The destination is ``Unavailable``, and the event has no
attempt counted, when nothing can have been processed (names, connections, TLS, addresses that are not dialled) or the
destination says so (429, 502, 503, 504, 410). Everything else is the event's failure: ``Refused`` when the status is
one of those that the settings call permanent or the receiver asks for no more attempts, else ``Failed``.

An address that is not dialled counts as unavailable: nothing was sent, no event is to blame, and names can be mended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import urlsplit

from outbox_relay.domain.outcomes import DELIVERED, Attempt, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks.webhook.response import NoResponse, Response, status_text

_GATEWAY = frozenset((502, 503, 504))
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DATES = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y")
"""The three forms of a date in HTTP (RFC 9110, 5.6.7), the last two obsolete and still to be read."""
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")

Text = Callable[[bytes], str | None]
"""The beginning of an answer's body as a text that may be kept."""


@dataclass(frozen=True, slots=True)
class ResponsePolicy:
    """What the settings decide about answers.

    ``permanent`` are the statuses that end an event at once; ``retry_after_max_seconds`` caps what ``retry-after``
    asks for.
    """

    permanent: frozenset[int] = frozenset((400,))
    retry_after_max_seconds: float = 3600.0


def verdict(outcome: Response | NoResponse, rules: ResponsePolicy, text: Text, now: float) -> Verdict:
    """The verdict of the event that ``outcome`` is about. ``now`` is the unix time, in seconds, of the answer."""
    if isinstance(outcome, NoResponse):
        return _of_no_response(outcome)
    if 200 <= outcome.status <= 299:
        return DELIVERED
    return _of_failure(outcome, rules, text, now)


def _of_no_response(fault: NoResponse) -> Verdict:
    attempt = Attempt(fault.code, fault.seconds, None, fault.timings)
    if fault.sent:
        return Failed(fault.reason, attempt=attempt)
    return Unavailable(fault.reason, attempt=attempt)


def _of_failure(answer: Response, rules: ResponsePolicy, text: Text, now: float) -> Verdict:
    status = answer.status
    wish = answer.headers.get("webhook-delivery", "").strip().lower()
    wait = retry_after_seconds(answer.headers, rules.retry_after_max_seconds, now)

    def attempt(code: str = f"http_{status}") -> Attempt:
        return Attempt(code, answer.seconds, text(answer.prefix), answer.timings)

    said = f"answered {status_text(status)}"
    if wish == "abort-message":
        return Refused(f"{said} and asked for no more attempts", status, attempt("aborted_by_receiver"))
    if wish == "disable":
        return Unavailable(
            f"{said} and asked for no more events", status, wait, attempt("endpoint_disabled"), gone=True
        )
    if status == HTTPStatus.GONE:
        return Unavailable(f"{said}: it wants no more events", status, None, attempt("endpoint_disabled"), gone=True)
    if status == HTTPStatus.TOO_MANY_REQUESTS or (status == HTTPStatus.SERVICE_UNAVAILABLE and wait is not None):
        return Unavailable(said, status, wait, attempt(), throttled=True)
    if status in _GATEWAY:
        return Unavailable(said, status, wait, attempt())
    if 300 <= status <= 399:
        return Failed(f"{said}{_to(answer)}; redirects are not followed", status, wait, attempt("redirect"))
    if status in rules.permanent:
        return Refused(said, status, attempt())
    return Failed(said, status, wait, attempt())


def _to(answer: Response) -> str:
    """Where a redirect leads: the host alone, since the rest of a URL may hold a token."""
    try:
        host = urlsplit(answer.headers.get("location", "")).hostname or ""
    except ValueError:
        host = ""
    return f" to {host}" if _HOST.fullmatch(host) else ""


def retry_after_seconds(headers: Mapping[str, str], most: float, now: float) -> float | None:
    """The seconds that ``retry-after`` asks for, at least 0 and at most ``most``; nothing when it says nothing legible.

    A date is compared with the ``date`` of the answer, so that the two clocks may differ, else with ``now`` in unix
    seconds. Fractions are rounded up; two headers, signs and exponents are not legible.
    """
    value = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return min(float(math.ceil(float(value))), most)
    at = _time(value)
    if at is None:
        return None
    theirs = _time(headers.get("date", "").strip())
    return min(max(0.0, at - (now if theirs is None else theirs)), most)


def _time(text: str) -> float | None:
    """The unix time of a date in HTTP, in seconds."""
    for form in _DATES:
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
