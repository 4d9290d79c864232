"""Answers and faults of a webhook: the verdict of each, and what is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.outcomes import DELIVERED, Attempt, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks.webhook.http_client import NoResponse, Response
from outbox_relay.sinks.webhook.results import ResponsePolicy, retry_after_seconds, verdict

NOW = 784_111_777.0
"""Sun, 06 Nov 1994 08:49:37 GMT, the date in the standard's examples."""
STEPS = (("dns", 0.01), ("first_byte", 0.2))


def text(response: Response) -> str | None:
    """Return the beginning of a body as these tests keep it."""
    return response.prefix.decode() or None


def judged(outcome: Response | NoResponse, policy: ResponsePolicy | None = None) -> Verdict:
    """Return the verdict of an outcome."""
    return verdict(outcome, policy or ResponsePolicy(), text, NOW)


def answered(status: int, headers: Mapping[str, str] | None = None, policy: ResponsePolicy | None = None) -> Verdict:
    """Return the verdict of an answer with a body."""
    return judged(Response(status, headers or {}, b"sorry", 0.5, STEPS), policy)


def attempt(code: str) -> Attempt:
    """Return the attempt kept of such a response."""
    return Attempt(code, 0.5, "sorry", STEPS)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 226, 299])
@pytest.mark.parametrize("whole", [True, False])
def test_every_2xx_delivers_whatever_becomes_of_the_body(status: int, whole: bool) -> None:
    headers = {"retry-after": "60", "webhook-delivery": "abort-message"}
    assert judged(Response(status, headers, b"\xff", whole=whole)) is DELIVERED


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 405, 408, 413, 415, 418, 422, 425, 431, 451, 499])
@pytest.mark.parametrize("wait", [None, 7.0])
def test_other_4xx_fail_and_are_tried_again(status: int, wait: float | None) -> None:
    found = answered(status, {} if wait is None else {"retry-after": "7"})
    assert isinstance(found, Failed)
    assert (found.status, found.retry_after_seconds, found.attempt) == (status, wait, attempt(f"http_{status}"))
    assert found.reason.startswith(f"answered {status}")


@pytest.mark.parametrize("status", [100, 101, 199, 500, 501, 505, 507, 511, 519, 528, 529, 531, 599, 600, 999])
def test_other_statuses_fail(status: int) -> None:
    found = answered(status)
    assert isinstance(found, Failed)
    assert found.attempt == attempt(f"http_{status}")


def test_statuses_are_refused_or_accepted_when_the_settings_say_so() -> None:
    policy = ResponsePolicy(permanent=frozenset((422, 500)))
    assert answered(422, policy=policy) == Refused("answered 422 Unprocessable Entity", 422, attempt("http_422"))
    assert answered(500, policy=policy) == Refused("answered 500 Internal Server Error", 500, attempt("http_500"))
    assert isinstance(answered(400, policy=policy), Failed)
    assert answered(409, policy=ResponsePolicy(accepted=frozenset((409,)))) is DELIVERED


@pytest.mark.parametrize("status", [502, 503, 504, *range(520, 528), 530])
def test_gateways_without_a_destination_are_unavailable(status: int) -> None:
    found = answered(status)
    assert isinstance(found, Unavailable)
    assert (found.status, found.throttled, found.gone, found.retry_after_seconds) == (status, False, False, None)
    assert found.attempt == attempt(f"http_{status}")


@pytest.mark.parametrize("status", [502, 504, 521])
def test_gateways_may_say_when_to_come_back(status: int) -> None:
    found = answered(status, {"retry-after": "9"})
    assert isinstance(found, Unavailable)
    assert (found.throttled, found.retry_after_seconds) == (False, 9.0)


@pytest.mark.parametrize(("status", "headers", "wait"), [(429, {}, None), (429, {"retry-after": "3"}, 3.0)])
def test_429_throttles(status: int, headers: dict[str, str], wait: float | None) -> None:
    expected = Unavailable("answered 429 Too Many Requests", 429, wait, attempt("http_429"), throttled=True)
    assert answered(status, headers) == expected


@pytest.mark.parametrize(("value", "throttled"), [("3", True), ("0", True), ("soon", False)])
def test_503_throttles_when_it_says_when_to_come_back(value: str, throttled: bool) -> None:
    found = answered(503, {"retry-after": value})
    assert isinstance(found, Unavailable)
    assert found.throttled is throttled


def test_410_is_gone() -> None:
    found = answered(410, {"retry-after": "5"})
    assert isinstance(found, Unavailable)
    assert (found.gone, found.throttled, found.status) == (True, False, 410)
    assert found.attempt == attempt("endpoint_disabled")


@pytest.mark.parametrize("status", [302, 400, 404, 410, 429, 500, 503])
def test_receiver_can_ask_for_no_more_attempts(status: int) -> None:
    found = answered(status, {"webhook-delivery": " Abort-Message "})
    assert isinstance(found, Refused)
    assert (found.status, found.attempt) == (status, attempt("aborted_by_receiver"))
    assert found.reason.endswith("and asked for no more attempts")


@pytest.mark.parametrize("status", [302, 400, 404, 429, 500, 503])
def test_receiver_can_ask_for_no_more_events(status: int) -> None:
    found = answered(status, {"webhook-delivery": "disable"})
    assert isinstance(found, Unavailable)
    assert (found.gone, found.throttled, found.attempt) == (True, False, attempt("endpoint_disabled"))


def test_other_wishes_are_none() -> None:
    assert isinstance(answered(500, {"webhook-delivery": "abort-message, disable"}), Failed)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("https://user:hunter2@new.example:8443/hook?token=hunter2", " to new.example"),
        ("//other.example/x", " to other.example"),
        ("/elsewhere?token=hunter2", ""),
        ("http://[::1", ""),
        ("https://hunter2\x1b[2J.example/", ""),
        ("https://hunter2\x1b.example/", ""),
        ("https://hun ter2.example/", ""),
        ("https://" + "h" * 300, ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308, 399])
def test_redirects_fail_and_name_the_host_alone(status: int, location: str, said: str) -> None:
    found = answered(status, {"location": location})
    assert isinstance(found, Failed)
    assert found.attempt == attempt("redirect")
    named = f"{status} {HTTPStatus(status).phrase}" if status != 399 else "399"
    assert found.reason == f"answered {named}{said}; redirects are not followed"


@pytest.mark.parametrize(
    "code", ["dns_error", "dns_timeout", "connection_refused", "connect_timeout", "tls_error", "ssrf_blocked"]
)
def test_without_a_connection_the_destination_is_unavailable(code: str) -> None:
    found = judged(NoResponse(code, sent=False, reason="why", seconds=0.5, timings=STEPS))
    assert found == Unavailable("why", attempt=Attempt(code, 0.5, None, STEPS))


@pytest.mark.parametrize("code", ["deadline", "connection_reset", "disconnected", "protocol_error"])
def test_after_sending_the_event_failed_and_before_it_did_not(code: str) -> None:
    assert judged(NoResponse(code, sent=True, reason="why")) == Failed("why", attempt=Attempt(code, 0.0))
    assert judged(NoResponse(code, sent=False, reason="why")) == Unavailable("why", attempt=Attempt(code, 0.0))


def test_a_failure_of_the_relay_says_nothing_about_the_destination() -> None:
    found = judged(NoResponse("internal", sent=False, reason="no free port"))
    assert found == Unavailable("no free port", attempt=Attempt("internal", 0.0), behind=True)


DATE = "Sun, 06 Nov 1994 08:50:37 GMT"
RETRY_AFTER: list[tuple[Mapping[str, str], float | None]] = [
    ({}, None),
    ({"retry-after": "120"}, 120.0),
    ({"retry-after": " 120 "}, 120.0),
    ({"retry-after": "0"}, 0.0),
    ({"retry-after": "120.6"}, 121.0),
    ({"retry-after": "0.001"}, 1.0),
    ({"retry-after": "999999999"}, 3600.0),
    *[
        ({"retry-after": junk}, None)
        for junk in (
            *("", "-1", "+1", "NaN", "inf", "1e9", "1000000000", "0x10", "1,000", "1 2", "soon", ".5", "5.", "٣"),
            *("60, 60", f"{DATE}, {DATE}", "9" * 10_000, "x" * 10_000, "Sun, 06 Nov 1994 08:50:37 +0100"),
            *("Sun, 31 Feb 1994 08:50:37 GMT", "Sun, 06 Nov 99999 08:50:37 GMT", "06 Nov 1994 08:50:37 GMT"),
        )
    ],
    ({"retry-after": DATE}, 60.0),
    ({"retry-after": "Sunday, 06-Nov-94 08:50:37 GMT"}, 60.0),
    ({"retry-after": "Sun Nov  6 08:50:37 1994"}, 60.0),
    ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.0),
    ({"retry-after": "Sat, 05 Nov 1994 08:49:37 GMT"}, 0.0),
    ({"retry-after": "Sun, 06 Nov 2094 08:49:37 GMT"}, 3600.0),
    ({"retry-after": DATE, "date": "Sun, 06 Nov 1994 08:50:07 GMT"}, 30.0),
    ({"retry-after": DATE, "date": "Sun, 06 Nov 1994 09:50:37 GMT"}, 0.0),
    ({"retry-after": DATE, "date": "yesterday"}, 60.0),
    ({"retry-after": "30", "date": "Sun, 06 Nov 1994 08:40:07 GMT"}, 30.0),
]


@pytest.mark.parametrize(("headers", "expected"), RETRY_AFTER, ids=[str(row[0])[:60] for row in RETRY_AFTER])
def test_retry_after_in_all_its_forms(headers: Mapping[str, str], expected: float | None) -> None:
    assert retry_after_seconds(headers, 3600.0, NOW) == expected


@given(st.text(max_size=40), st.text(max_size=40))
def test_whatever_retry_after_holds_is_bounded(value: str, date: str) -> None:
    found = retry_after_seconds({"retry-after": value, "date": date}, 60.0, NOW)
    assert found is None or 0.0 <= found <= 60.0


@given(st.integers(0, 999), st.text(max_size=20), st.text(max_size=30))
def test_every_answer_has_a_verdict(status: int, wish: str, location: str) -> None:
    found = answered(status, {"webhook-delivery": wish, "location": location})
    assert found is DELIVERED or (isinstance(found, Failed | Refused | Unavailable) and found.attempt is not None)
