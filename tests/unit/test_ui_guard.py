"""The guard of the page: origins, hosts, bodies, headers, users and roles. Without a database."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import ASGITransport
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from outbox_relay.ui.access import (
    FAILURES_MOST,
    FAILURES_SECONDS,
    HASHES_AT_ONCE,
    REMEMBERED_SECONDS,
    Access,
    Anyone,
    Basic,
    Host,
    Tokens,
    TrustedProxy,
    read_networks,
)
from outbox_relay.ui.guard import BODY, BODY_BYTES, HEADERS, USER, Guard, host_names
from outbox_relay.ui.users import FileContent, User, read_tokens, read_users
from tests.support.passwords import basic, quick_hash

ADDRESS = "http://127.0.0.1:8090"
OWN = {"sec-fetch-site": "same-origin"}
OPERATOR, VIEWER = User("anna", "operator"), User("bob", "viewer")
TOKEN = "t" * 20


HASH = quick_hash("correct horse")


async def _answer(request: Request) -> Response:
    if request.method == "POST":
        assert isinstance(request.scope[BODY], bytes)
    return PlainTextResponse(request.scope[USER].name)


def _refuse(_request: object, status: int, reason: str) -> Response:
    return PlainTextResponse(reason, status)


def client(
    access: Access, *, address: str = ADDRESS, peer: tuple[str, int] = ("127.0.0.1", 5), **options: Any
) -> httpx.AsyncClient:
    methods = ["GET", "POST"]
    routes = [Route(path, _answer, methods=methods) for path in ("/", "/search", "/actions/pause", "/api/v1/sinks")]
    app = Guard(Starlette(routes=routes), access, _refuse, **options)
    return httpx.AsyncClient(transport=ASGITransport(app, client=peer), base_url=address)


async def test_every_answer_has_the_headers_that_protect_it() -> None:
    async with client(Anyone(OPERATOR)) as page:
        for answer in (await page.get("/"), await page.get("/nowhere"), await page.post("/", headers={})):
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "'unsafe" not in HEADERS["content-security-policy"]
    assert "frame-ancestors 'none'" in HEADERS["content-security-policy"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:8091"},
        {"sec-fetch-site": "cross-site", "origin": ADDRESS},
    ],
)
async def test_a_post_from_another_site_is_refused(headers: dict[str, str]) -> None:
    async with client(Anyone(OPERATOR)) as page:
        answer = await page.post("/actions/pause", headers=headers)
        assert (answer.status_code, "another site" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "headers", [OWN, {"origin": ADDRESS}, {**OWN, "origin": ADDRESS}, {**OWN, "origin": "https://through.a.proxy"}]
)
async def test_a_post_from_our_own_page_is_answered(headers: dict[str, str]) -> None:
    async with client(Anyone(OPERATOR)) as page:
        assert (await page.post("/actions/pause", headers=headers)).text == "anna"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8090", 200), ("localhost", 200), ("[::1]:8090", 200), ("LOCALHOST:1", 200),
        ("evil.example:8090", 421), ("", 421), ("127.0.0.1.evil.example", 421),
    ],
)  # fmt: skip
async def test_on_loopback_only_our_own_names_are_answered(host: str, status: int) -> None:
    """A foreign site may let its name lead to 127.0.0.1, and its pages would then be of the same origin."""
    async with client(Anyone(OPERATOR), hosts=host_names("127.0.0.1")) as page:
        assert (await page.get("/", headers={"host": host})).status_code == status


async def test_bodies_are_bounded_whatever_their_length_is_said_to_be() -> None:
    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(3):
            yield b"x" * (BODY_BYTES // 2)

    async with client(Anyone(OPERATOR)) as page:
        assert (await page.post("/actions/pause", headers=OWN, content=b"x" * (BODY_BYTES + 1))).status_code == 413
        assert (await page.post("/actions/pause", headers=OWN, content=pieces())).status_code == 413
        assert (await page.post("/actions/pause", headers=OWN, content=b"x" * BODY_BYTES)).status_code == 200
        for length in ("-1", "1e3", "9" * 11):
            answer = await page.post("/actions/pause", headers={**OWN, "content-length": length})
            assert answer.status_code == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
async def test_other_methods_are_refused(method: str) -> None:
    async with client(Anyone(OPERATOR)) as page:
        assert (await page.request(method, "/", headers=OWN)).status_code == 405


async def test_a_viewer_may_look_and_search_but_not_act() -> None:
    async with client(Anyone(VIEWER)) as page:
        assert (await page.get("/")).status_code == 200
        assert (await page.post("/search", headers=OWN)).status_code == 200
        answer = await page.post("/actions/pause", headers=OWN)
        assert (answer.status_code, answer.text) == (403, "bob is a viewer: only an operator may do this")
        assert (await page.post("/api/v1/sinks", headers=OWN)).status_code == 403


async def test_a_read_only_page_refuses_every_action() -> None:
    async with client(Anyone(OPERATOR), read_only=True) as page:
        assert (await page.post("/actions/pause", headers=OWN)).status_code == 403
        assert (await page.post("/search", headers=OWN)).status_code == 200


# -- names and passwords ----------------------------------------------------------------------------------------------


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "users"
    path.write_text(f"anna:operator:{HASH}\nbob:viewer:{HASH}\nproxied:operator:\n", encoding="utf-8")
    return path


def write(path: Path, text: str) -> None:
    """Replace the content of a file."""
    path.write_text(text, encoding="utf-8")


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


async def test_names_and_passwords_of_the_file_are_accepted(users: Path) -> None:
    async with client(Basic(FileContent(users, read_users))) as page:
        assert (await page.get("/", headers=basic("anna", "correct horse"))).text == "anna"
        assert (await page.get("/", headers=basic("bob", "correct horse"))).text == "bob"
        asked = await page.get("/")
        assert (asked.status_code, asked.headers["www-authenticate"]) == (401, Basic.CHALLENGE)


@pytest.mark.parametrize(
    "headers",
    [
        basic("anna", "wrong"), basic("carl", "correct horse"), basic("proxied", ""), basic("anna", ""),
        {"authorization": "Basic"}, {"authorization": "Basic !!"}, {"authorization": "Digest x"},
        {"authorization": f"Basic {b64encode(b'no colon').decode()}"}, {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"Basic {b64encode(bytes([255, 58])).decode()}"},
    ],
)  # fmt: skip
async def test_everything_else_is_refused(users: Path, headers: dict[str, str]) -> None:
    async with client(Basic(FileContent(users, read_users))) as page:
        assert (await page.get("/", headers=headers)).status_code == 401


async def test_wrong_passwords_of_an_address_are_limited(users: Path) -> None:
    clock = Clock()
    async with client(Basic(FileContent(users, read_users), clock)) as page:
        assert (await page.get("/", headers=basic("bob", "correct horse"))).status_code == 200
        for _ in range(FAILURES_MOST):
            assert (await page.get("/", headers=basic("anna", "wrong"))).status_code == 401
        assert (await page.get("/", headers=basic("anna", "correct horse"))).status_code == 429
        assert (await page.get("/", headers=basic("bob", "correct horse"))).status_code == 200, "known since before"
        clock.now += FAILURES_SECONDS + 1
        assert (await page.get("/", headers=basic("anna", "correct horse"))).status_code == 200


async def test_addresses_of_one_ipv6_network_count_together(users: Path) -> None:
    access = Basic(FileContent(users, read_users), Clock())
    for host in range(FAILURES_MOST):
        async with client(access, peer=(f"2001:db8::{host + 1:x}", 5)) as page:
            assert (await page.get("/", headers=basic("anna", "wrong"))).status_code == 401
    async with client(access, peer=("2001:db8::ffff", 5)) as page:
        assert (await page.get("/", headers=basic("anna", "wrong"))).status_code == 429
    async with client(access, peer=("2001:db8:1::1", 5)) as page:
        assert (await page.get("/", headers=basic("anna", "wrong"))).status_code == 401


async def test_a_password_that_was_changed_counts_at_once(users: Path) -> None:
    clock = Clock()
    async with client(Basic(FileContent(users, read_users), clock)) as page:
        assert (await page.get("/", headers=basic("anna", "correct horse"))).status_code == 200
        write(users, f"anna:operator:{quick_hash('another')}\n")
        assert (await page.get("/", headers=basic("anna", "correct horse"))).status_code == 401
        assert (await page.get("/", headers=basic("anna", "another"))).status_code == 200
        clock.now += REMEMBERED_SECONDS + 1
        assert (await page.get("/", headers=basic("anna", "another"))).status_code == 200


async def test_a_file_that_cannot_be_read_any_more_lets_no_user_in(users: Path) -> None:
    async with client(Basic(FileContent(users, read_users))) as page:
        write(users, "nonsense")
        answer = await page.get("/", headers=basic("anna", "correct horse"))
        assert (answer.status_code, str(users) in answer.text) == (503, False)


# -- a proxy, tokens, a host ------------------------------------------------------------------------------------------


async def test_only_a_trusted_proxy_names_users(users: Path) -> None:
    networks = read_networks("10.0.0.0/8, 192.0.2.7, 2001:db8::/32")
    access = TrustedProxy("X-User", networks, FileContent(users, read_users))
    for peer, status in (("10.1.2.3", 200), ("192.0.2.7", 200), ("2001:db8::1", 200), ("::ffff:10.1.2.3", 200),
                         ("192.0.2.8", 403), ("127.0.0.1", 403), ("", 403), ("unix", 403)):  # fmt: skip
        async with client(access, peer=(peer, 5)) as page:
            assert (await page.get("/", headers={"x-user": "anna"})).status_code == status, peer
    async with client(access, peer=("10.0.0.1", 5)) as page:
        assert (await page.post("/actions/pause", headers={**OWN, "x-user": "proxied"})).status_code == 200
        assert (await page.post("/actions/pause", headers={**OWN, "x-user": "stranger"})).status_code == 403
        assert (await page.get("/", headers={"x-user": "stranger"})).text == "stranger"
        assert (await page.get("/")).status_code == 401
        assert (await page.get("/", headers=[("x-user", "anna"), ("x-user", "bob")])).status_code == 401
        for name in ("jürgen", "Nicolà"):
            assert (await page.get("/", headers=[(b"x-user", f" {name}".encode())])).text == name


async def test_a_proxy_may_add_a_token_of_its_own(tmp_path: Path) -> None:
    """Goes red when it is taken for one of the file, which locks everybody out of the page."""
    path = tmp_path / "tokens"
    path.write_text(f"operator:{TOKEN}\n", encoding="utf-8")
    access, tokens = TrustedProxy("X-User", read_networks("10.0.0.0/8")), Tokens(FileContent(path, read_tokens))
    async with client(access, tokens=tokens, peer=("10.0.0.1", 5)) as page:
        own = {"x-user": "anna", "authorization": "Bearer of.the.proxy"}
        assert (await page.get("/", headers=own)).text == "anna"
        assert (await page.get("/", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 401
        assert (await page.get("/api/v1/sinks", headers=own)).status_code == 401


async def test_tokens_are_for_the_api_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"operator:{TOKEN}\n", encoding="utf-8")
    tokens = Tokens(FileContent(path, read_tokens))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    async with client(Anyone(VIEWER), tokens=tokens) as page:
        assert (await page.get("/api/v1/sinks", headers=bearer)).text == "token-1"
        assert (await page.post("/api/v1/sinks", headers=bearer)).text == "token-1", "a token is no cookie"
        assert (await page.get("/", headers=bearer)).status_code == 401
        for _ in range(FAILURES_MOST):
            wrong = await page.get("/api/v1/sinks", headers={"authorization": f"Bearer {TOKEN}x"})
            assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, Tokens.CHALLENGE)
        assert (await page.get("/api/v1/sinks", headers=bearer)).status_code == 200, "others need not wait"


async def test_a_bearer_that_no_token_verifies_is_no_reason_to_skip_a_check() -> None:
    async with client(Host(lambda _request: OPERATOR)) as page:
        headers = {"authorization": "Bearer x", "sec-fetch-site": "cross-site"}
        assert (await page.post("/api/v1/sinks", headers=headers)).status_code == 403


async def test_a_request_that_breaks_off_is_not_carried_out() -> None:
    """A part of it may mean more than the whole: a filter without its last field."""
    sent: list[Any] = []
    parts: list[Any] = [{"type": "http.request", "body": b"state=dead", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("it was carried out")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/actions/retry",
        "headers": [(b"origin", b"http://h"), (b"host", b"h")],
    }
    await Guard(app, Anyone(OPERATOR), _refuse)(scope, receive, send)
    assert sent[0]["status"] == 413


async def test_a_page_of_another_site_cannot_make_ours_work() -> None:
    async with client(Anyone(OPERATOR)) as page:
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await page.get("/", headers=image)).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await page.get("/", headers=link)).status_code == 200


async def test_wrong_passwords_at_once_are_limited_too(users: Path) -> None:
    async with client(Basic(FileContent(users, read_users), Clock())) as page:
        answers = await asyncio.gather(*(page.get("/", headers=basic("anna", f"wrong {n}")) for n in range(60)))
        tried = [answer.status_code for answer in answers].count(401)
        assert tried <= FAILURES_MOST + HASHES_AT_ONCE
        assert (await page.get("/", headers=basic("bob", "correct horse"))).status_code == 200, "another name"
