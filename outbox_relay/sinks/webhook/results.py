"""Turn a response, or the lack of one, into the verdict of the event. Pure: the caller passes the time.

A response of 200 to 299, or of a status that the settings accept, delivers, whatever becomes of its body. The
destination is ``Unavailable``, and no attempt of the event is counted, when nothing can have been processed (names,
connections, TLS, addresses that are not dialled) or it or its gateway says so (429, 502 to 504, 520 to 527, 530, 410).
Everything else is the event's failure: ``Refused`` when the
settings call the status permanent or the receiver asks for no more attempts, else ``Failed``.

An address that is not dialled counts as unavailable: nothing was sent, no event is to blame, and names can be mended.
A failure of the relay itself, such as a machine without free ports or files, says nothing about the destination: its
circuit does not count it, and the event is tried again soon.
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
from outbox_relay.sinks.webhook.http_client import NoResponse, Response, status_text

GATEWAY = frozenset((502, 503, 504, *range(520, 528), 530))
"""Statuses of gateways whose origin does not answer. Those from 520 on are those of Cloudflare."""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DATES = ("%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y")
"""The three forms of a date in HTTP (RFC 9110, 5.6.7), the last two obsolete but still in use."""
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


ToText = Callable[[Response], str | None]
"""Turns the beginning of a response's body into a text that may be kept."""


@dataclass(frozen=True, slots=True)
class ResponsePolicy:
    """The meaning of responses, by the settings.

    ``accepted`` are further statuses that deliver, and ``permanent`` those after which an event is dead at once.
    ``retry_after_max_seconds`` caps the wait that ``retry-after`` asks for.
    """

    accepted: frozenset[int] = frozenset()
    permanent: frozenset[int] = frozenset()
    retry_after_max_seconds: float = 3600.0


def verdict(outcome: Response | NoResponse, policy: ResponsePolicy, to_text: ToText, now: float) -> Verdict:
    """Return the verdict of the event whose request had ``outcome``. ``now`` is the unix time of that, in seconds."""
    if isinstance(outcome, NoResponse):
        return _of_no_response(outcome)
    if 200 <= outcome.status <= 299 or outcome.status in policy.accepted:
        return DELIVERED
    return _of_failure(outcome, policy, to_text, now)


def _of_no_response(outcome: NoResponse) -> Verdict:
    attempt = Attempt(outcome.code, outcome.seconds, None, outcome.timings)
    if outcome.sent:
        return Failed(outcome.reason, attempt=attempt)
    return Unavailable(outcome.reason, attempt=attempt, behind=outcome.code == "internal")


def _of_failure(response: Response, policy: ResponsePolicy, to_text: ToText, now: float) -> Verdict:
    status = response.status
    wish = response.headers.get("webhook-delivery", "").strip().lower()
    wait = retry_after_seconds(response.headers, policy.retry_after_max_seconds, now)

    def attempt(code: str = f"http_{status}") -> Attempt:
        return Attempt(code, response.seconds, to_text(response), response.timings)

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
    if status in GATEWAY:
        return Unavailable(said, status, wait, attempt())
    if 300 <= status <= 399:
        return Failed(f"{said}{_target(response)}; redirects are not followed", status, wait, attempt("redirect"))
    if status in policy.permanent:
        return Refused(said, status, attempt())
    return Failed(said, status, wait, attempt())


def _target(response: Response) -> str:
    """Return where a redirect leads: the host alone, since the rest of a URL may hold a token."""
    try:
        host = urlsplit(response.headers.get("location", "")).hostname or ""
    except ValueError:
        host = ""
    return f" to {host}" if _HOST.fullmatch(host) else ""


def retry_after_seconds(headers: Mapping[str, str], most: float, now: float) -> float | None:
    """Return the seconds that ``retry-after`` asks for, from 0 to ``most``, or None when it is missing or invalid.

    A date is compared with the ``date`` of the response, since the clocks may differ, else with ``now`` in unix
    seconds. Fractions are rounded up; two headers, signs and exponents are invalid.
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
    """Return the unix time of a date in HTTP, in seconds, or None."""
    for form in _DATES:
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
        except (ValueError, OverflowError):
            continue
    return None
