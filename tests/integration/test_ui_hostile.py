"""The page under hostile requests, at once and byte by byte, and with a database that is lost, locked or too slow."""

from __future__ import annotations

import itertools
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outbox_relay.ui.access import FAILURES_MOST, Basic, Tokens, TrustedProxy, read_networks
from outbox_relay.ui.guard import HEADERS
from outbox_relay.ui.site import CONNECTIONS
from outbox_relay.ui.users import FileContent, User, UserEntry, read_tokens, read_users
from tests.support import books as owned
from tests.support.database import Database
from tests.support.ledger import Ledger
from tests.support.page import browsing, served, visible
from tests.support.passwords import basic, quick_hash

books = owned.books

VALUES = (
    "%00", "..%2f..%2fetc%2fpasswd", "x" * 2000, "9223372036854775808", "%ED%A0%80", "'%22%3E%3Cb%3E", "infinity",
)  # fmt: skip
PLACES = (
    "/{}", "/sinks/{}", "/sinks/s?period={}", "/events/{}",
    "/exceptions?key_hash={}", "/jobs/{}", "/static/{}", "/replays/{}",
    "/actions/{}", "/schedules?after={}", "/audit?since={}", "/exceptions?{}", "/exceptions?before={}",
    "/exceptions?uid={}", "/exceptions?since={}", "/exceptions?status={}", "/exceptions?view=groups&kind={}",
    "/exceptions/export?error={}", "/actions/seek?sink=s&to={}", "/actions/retry?counted={}&state=dead",
    "/actions/replay?sink=s&since=1d&rate={}", "/actions/replay-pause?id={}", "/actions/schedule-run?schedule={}",
)  # fmt: skip


def test_hostile_values_in_every_place_are_answered_with_a_page_or_a_sentence(books: Ledger) -> None:
    with browsing(books.database, show_payloads=True) as page:
        for n, (place, value) in enumerate(itertools.product(PLACES, VALUES)):
            answer = page.client.get(("", "/api/v1")[n % 2] + place.replace("{}", value))
            assert answer.status_code in (200, 400, 404, 405), answer.url
            assert "Traceback" not in answer.text, answer.url
            assert HEADERS.items() <= dict(answer.headers).items(), answer.url


def ask(address: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and return status, headers and content of the answer."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection, connection.makefile("rb") as answer:
        connection.sendall(request.replace(b"HOST", f"{host}:{port}".encode()))
        head, _, body = answer.read().partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers, body


END = b"\r\n\r\n"
REQUESTS = [
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.0\r\n\r\n", 421),
    (b"GET / HTTP/1.1\r\nHost: HOST\r\nHost: evil.example\r\n\r\n", 400),
    (b"OPTIONS * HTTP/1.1\r\nHost: HOST\r\n\r\n", 405),
    (b"TRACE / HTTP/1.1\r\nHost: HOST\r\n\r\n", 405),
    (b"POST /relays HTTP/1.1\r\nHost: HOST\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 0\r\n\r\n", 405),
    (b"GET /static/../users.py HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    (b"GET /static/..%2fusers.py HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    (b"GET //evil.example/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    (b"GET http://evil.example/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
    (b"GET / HTTP/1.1\r\nHost: HOST\r\nCookie: outbox_relay_csrf=\xff\x00\r\n\r\n", 400),
    (b"POST /search HTTP/1.1\r\nHost: HOST\r\nOrigin: http://HOST\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
]


def test_requests_as_no_browser_makes_them_are_refused_with_a_sentence(database: Database) -> None:
    with served(database, User("anna", "operator")) as address:
        for request, expected in REQUESTS:
            status, headers, body = ask(address, request.replace(END, b"\r\nConnection: close" + END, 1))
            assert status == expected, request[:80]
            assert b"Traceback" not in body
            if status != 400:  # which uvicorn answers by itself, with a fixed text
                assert HEADERS.items() <= headers.items(), request[:80]
            if status == 405:
                assert set(headers["allow"].split(", ")) <= {"GET", "HEAD", "POST"}
        head = b"HEAD /exceptions HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n"
        status, headers, body = ask(address, head)
        assert (status, body) == (200, b""), "an answer to HEAD has no content"
        assert int(headers["content-length"]) > 1000


# -- what the network says --------------------------------------------------------------------------------------------

FORWARDED = (
    {"x-forwarded-for": "10.0.0.1"}, {"x-forwarded-for": "10.0.0.1, 127.0.0.1"}, {"forwarded": "for=10.0.0.1"},
    {"x-real-ip": "10.0.0.1"}, {"x-forwarded-for": "::ffff:10.0.0.1", "x-forwarded-proto": "https"},
)  # fmt: skip


@pytest.fixture
def users(tmp_path: Path) -> FileContent[dict[str, UserEntry]]:
    path = tmp_path / "users"
    path.write_text(f"anna:operator:{quick_hash('correct horse')}\n", encoding="utf-8")
    return FileContent(path, read_users)


def request_of(headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"GET / HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n{lines}\r\n".encode()


@pytest.mark.parametrize("forwarded", FORWARDED, ids=str)
def test_a_client_cannot_pretend_to_be_the_proxy(database: Database, forwarded: dict[str, str]) -> None:
    """Goes red if uvicorn believes the headers of proxies, as it does without ``proxy_headers=False``."""
    with served(database, TrustedProxy("X-User", read_networks("10.0.0.0/8"))) as address:
        status, _, body = ask(address, request_of({**forwarded, "X-User": "anna"}))
    assert (status, b"only if they come through the proxy" in body) == (403, True)


def test_a_client_cannot_pretend_to_be_many(database: Database, users: FileContent[dict[str, UserEntry]]) -> None:
    wrong = basic("anna", "wrong")
    with served(database, Basic(users)) as address:
        for n in range(FAILURES_MOST):
            forwarded = {"x-forwarded-for": f"10.0.0.{n}", "x-real-ip": f"10.0.0.{n}", "forwarded": f"for=10.0.0.{n}"}
            assert (ask(address, request_of({**wrong, **forwarded})))[0] == 401
        assert (ask(address, request_of({**wrong, "x-forwarded-for": "10.0.1.1"})))[0] == 429
        assert (ask(address, request_of(basic("anna", "correct horse"))))[0] == 429, "it can be guessed no more"


# -- what is written down ---------------------------------------------------------------------------------------------


def test_no_payload_key_password_or_token_is_logged(
    books: Ledger, tmp_path: Path, users: FileContent[dict[str, UserEntry]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    [event] = books.emit("SECRET-KEY", payload=b"SECRET-PAYLOAD", headers='{"h": "SECRET-HEADER"}')
    books.park("s", books.row(event, "dead", error="SECRET-ANSWER"))
    uid = books.uid(event)
    path = tmp_path / "tokens"
    path.write_text(f"operator:{'SECRET-TOKEN' * 2}\n", encoding="utf-8")
    tokens = Tokens(FileContent(path, read_tokens))
    with browsing(books.database, access=Basic(users), tokens=tokens, show_payloads=True) as page:
        for password in ("SECRET-PASSWORD", "SECRET-PASSWORD" * 100, *["SECRET-PASSWORD"] * FAILURES_MOST):
            page.client.get("/", headers=basic("anna", password))
        for token in ("SECRET-TOKEN", "SECRET-TOKEN" * 2):
            page.client.get("/api/v1/exceptions/export", headers={"authorization": f"Bearer {token}"})
    assert "too many wrong passwords" in caplog.text, "nothing was captured"
    with browsing(books.database, show_payloads=True) as page:
        assert "SECRET-PAYLOAD" in page.get(f"/events/{uid}")
        assert "SECRET-PAYLOAD" in page.get("/exceptions/export")
        location = (page.post("/search", {"q": "SECRET-KEY"})).headers["location"]
        assert "SECRET" not in location
        page.get(location)
        books.do("alter table outbox.delivery rename column payload to hidden")
        page.get("/exceptions/export", 503)
        books.do("alter table outbox.delivery rename column hidden to payload")
        with books.database.connect() as other:
            other.execute("lock table outbox.delivery in access exclusive mode")
            page.get(location, 503)
        page.act(f"/actions/retry?uid={uid}&state=dead", reason="SECRET-REASON")
    assert "SECRET" not in caplog.text


# -- a database in trouble --------------------------------------------------------------------------------------------


def test_a_page_that_loses_its_connections_says_so_and_comes_back(books: Ledger) -> None:
    ours = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    with browsing(books.database) as page:
        page.get("/")
        page.json("/doctor")
        books.do(f"select pg_terminate_backend(pid, 10000) {ours}")
        answers = [page.client.get("/exceptions") for _ in range(CONNECTIONS + 1)]
        assert answers[-1].status_code == 200
        for answer in answers:
            said = visible(answer.text)
            assert answer.status_code == 200 or "Reload the page: it connects again by itself" in said, said
            assert "Traceback" not in said


def test_a_table_that_is_locked_costs_a_page_seconds_and_the_others_nothing(books: Ledger) -> None:
    with browsing(books.database) as page, ThreadPoolExecutor() as threads:
        page.get("/")
        with books.database.connect() as other:
            other.execute("lock table outbox.delivery in access exclusive mode")
            waiting = [threads.submit(page.client.get, "/exceptions") for _ in range(2)]
            for path in ("/", "/audit"):
                page.get(path)
            for answer in (each.result() for each in waiting):
                assert answer.status_code == 503
                assert "the database ended statement" in visible(answer.text)
                assert "outbox-relay doctor names the obstacle" in visible(answer.text)
