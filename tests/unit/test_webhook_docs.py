"""The page about webhooks: its snippets run, its example is what is sent, its tables are complete."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from outbox_relay import __version__
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable
from outbox_relay.formats.signatures import parse_key
from outbox_relay.sinks.webhook.http_client import NoResponse, Response
from outbox_relay.sinks.webhook.request import Credentials, Request, RequestFormat, make_request
from outbox_relay.sinks.webhook.results import ResponsePolicy, verdict

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "webhooks.md").read_text(encoding="utf-8")
SECRET = "whsec_ZXhhbXBsZS1vZi1hLW5ldy1zZWNyZXQtLS0t"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def snippets(language: str) -> list[str]:
    """Return the code blocks of the page in one language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]


def made(now: float, *secrets: str) -> Request:
    """Return the request of the page's example, at another time."""
    event = StoredEvent(
        *(1, 0, "019a0000-0000-7000-8000-000000000001", "order.created", "order-1", b'{"id": 1}', "application/json"),
        *(f'{{"traceparent": "{TRACE}"}}', None, datetime(2026, 1, 1, tzinfo=UTC)),
    )
    return make_request(
        event, RequestFormat(), Credentials([parse_key(secret) for secret in secrets]), attempt=1, now=now
    )


def test_example_is_what_is_sent() -> None:
    [text] = snippets("http")
    head, _, body = text.partition("\n\n")
    first, *lines = head.splitlines()
    assert first == "POST /hooks/shop HTTP/1.1"
    found = made(1_800_000_000, SECRET)
    shown = dict(line.split(": ", 1) for line in lines)
    assert shown.pop("host") == "crm.example.com"
    assert shown.pop("content-length") == str(len(body.encode()))
    assert shown == dict(found.headers)
    assert shown["user-agent"] == f"outbox-relay/{__version__}"
    assert body.encode() == found.body


VERIFY = [text for text in snippets("python") if "def verify" in text]


@pytest.mark.parametrize("text", VERIFY, ids=["library", "plain"])
def test_receivers_verify_with_the_snippets(text: str) -> None:
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102 - the snippet of the page
    found = made(time.time(), "whsec_" + "A" * 32, SECRET)
    names["verify"](SECRET, dict(found.headers), found.body)
    old = made(time.time() - 301, SECRET)
    for headers, body in ((found.headers, found.body + b" "), (old.headers, old.body)):
        with pytest.raises(Exception, match=r"(?i)matching signature|too old"):
            names["verify"](SECRET, dict(headers), body)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


OUTCOMES: dict[str, list[Response | NoResponse]] = {
    "200 to 299": [Response(200), Response(299, whole=False), Response(409)],
    "`permanent_statuses`": [Response(422)],
    "any other 4xx or 5xx": [Response(400), Response(401), Response(408), Response(425), Response(500)],
    "300 to 399": [Response(300), Response(308), Response(399)],
    "no answer in time": [
        NoResponse("read_timeout", sent=True, reason="-"),
        NoResponse("disconnected", sent=True, reason="-"),
    ],
    "any failure with": [Response(500, {"webhook-delivery": "abort-message"})],
    "502, 504, 520 to 527": [Response(status) for status in (502, 503, 504, 520, 527, 530)],
    "429; 503": [Response(429), Response(503, {"retry-after": "1"})],
    "410; any failure": [Response(410), Response(500, {"webhook-delivery": "disable"})],
    "no name": [
        NoResponse(code, sent=False, reason="-") for code in ("dns_error", "tls_error", "ssrf_blocked", "proxy_error")
    ],
}


@pytest.mark.parametrize("row", rows("Effect of responses"), ids=lambda row: row[0][:20])
def test_table_of_answers_is_true(row: list[str]) -> None:
    answer, event, sink = row
    event = event.replace("the same", "is tried again")
    [outcomes] = [found for name, found in OUTCOMES.items() if answer.startswith(name)]
    for outcome in outcomes:
        match verdict(outcome, ResponsePolicy(frozenset((409,)), frozenset((422,))), lambda _: None, time.time()):
            case Failed():
                said = ("is tried again", "")
            case Refused():
                said = ("is dead at once", "")
            case Unavailable(throttled=True):
                said = ("waits", "its circuit opens at once")
            case Unavailable(gone=True):
                said = ("waits", "is paused")
            case Unavailable():
                said = ("waits", "its circuit opens after")
            case found:
                assert found is DELIVERED
                said = ("is delivered", "")
        assert event.startswith(said[0])
        assert sink.startswith(said[1])
        assert bool(sink) == bool(said[1])
