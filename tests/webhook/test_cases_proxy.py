"""Through a forward proxy: it is asked for the name, refuses without an attempt being counted, and sees no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.sinks.webhook import connector
from outbox_relay.sinks.webhook.response import HEAD_BYTES
from tests.support.connect_proxy import GOOD, proxying
from tests.support.names import Names
from tests.support.ports import LOOPBACK, free_port
from tests.support.receiver import Receiver
from tests.support.receiver.answers import head
from tests.support.receiver.certificates import NAME, Authority
from tests.support.webhook_sink import a_sink, code, outcome, sending, verdict

AUTHORIZATION = "Basic Y2FuYXJ5OmNhbmFyeQ=="


async def test_a_proxy_is_asked_for_the_name_and_the_certificate_is_that_of_the_name(
    names: Names, authority: Authority
) -> None:
    """The relay looks up no name and judges no address: the proxy does."""
    names.say(NAME, ["10.0.0.1"])
    with Receiver(tls=authority.good(NAME)) as receiver:
        async with proxying() as proxy:
            changes: dict[str, Any] = {"proxy": proxy.url, "allow_networks": [], "ca_file": authority.certificate_file}
            async with sending(receiver.url_of(NAME), **changes) as sink:
                assert [await verdict(sink) for _ in range(3)] == [DELIVERED] * 3
            target = f"{NAME}:{receiver.port}"
            assert proxy.asked == [f"CONNECT {target} HTTP/1.1"]
            assert proxy.heads == [{"host": target}]
        assert {request.header("host") for request in receiver.requests} == {target}
        assert receiver.unverified == []
    assert names.asked[NAME] == 0


async def test_a_wrong_certificate_behind_a_proxy_is_the_destinations_fault(authority: Authority) -> None:
    with Receiver(tls=authority.wrong_host()) as receiver:
        async with proxying() as proxy:
            found = await outcome(receiver.url_of(NAME), proxy=proxy.url, ca_file=authority.certificate_file)
        assert receiver.requests == []
    assert isinstance(found, Unavailable)
    assert code(found) == "tls_error"


async def test_plain_http_goes_through_the_proxy_in_the_same_way() -> None:
    with Receiver() as receiver:
        async with proxying() as proxy:
            assert await outcome(receiver.url_of(NAME), proxy=proxy.url) == DELIVERED
            assert proxy.asked == [f"CONNECT {NAME}:{receiver.port} HTTP/1.1"]
        assert receiver.requests[0].target == "/hooks"


REFUSALS: dict[str, tuple[bytes | None, str]] = {
    "407": (
        head(407, [("proxy-authenticate", "Basic")]) + b"canary",
        "answered 407 Proxy Authentication Required: it wants a user and a password in proxy",
    ),
    "403": (head(403, [], "canary") + b"canary", "answered 403 Forbidden"),
    "502": (head(502), "answered 502 Bad Gateway"),
    "503": (head(503, [("retry-after", "canary")]), "answered 503 Service Unavailable"),
    "a status of its own": (head(599), "answered 599"),
    "a redirect": (head(302, [("location", "http://canary/")]), "answered 302 Found"),
    "no HTTP": (b"canary\r\n\r\n", "no answer to CONNECT"),
    "something behind its answer": (GOOD + b"canary", "no answer to CONNECT"),
    "nothing": (None, "the connection was closed"),
    "a head without end": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES, "head longer than"),
    "silence": (b"", "is not reached"),
}


@pytest.mark.parametrize(("answer", "said"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_case_25_a_proxy_that_refuses_counts_no_attempt(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, said: str
) -> None:
    monkeypatch.setattr(connector, "CONNECT_SECONDS", 0.5)
    with Receiver() as receiver:
        async with proxying() as proxy:
            proxy.answer = answer
            found = await outcome(receiver.url, proxy=proxy.url)
        assert receiver.connections == 0
    assert isinstance(found, Unavailable)
    assert code(found) == "proxy_error"
    assert said in found.reason
    assert "canary" not in found.reason


@pytest.mark.parametrize("host", [LOOPBACK, "proxy.test"])
async def test_case_25_a_proxy_that_is_not_there_counts_no_attempt(names: Names, host: str) -> None:
    """By a dead port, and by a name that does not resolve."""
    with Receiver() as receiver:
        found = await outcome(receiver.url, proxy=f"http://{host}:{free_port()}")
        assert receiver.connections == 0
    assert isinstance(found, Unavailable)
    assert code(found) == "proxy_error"
    assert names.asked[host] == (host != LOOPBACK)


async def test_what_the_proxy_is_shown_is_for_the_proxy_alone(tmp_path: Path) -> None:
    file = tmp_path / "proxy"
    with Receiver() as receiver:
        async with proxying() as proxy:
            file.write_text(proxy.url.replace("//", "//canary:canary@") + "\n")
            async with sending(receiver.url, proxy={"file": file}) as sink:
                assert await verdict(sink) == DELIVERED
            assert [sent.get("proxy-authorization") for sent in proxy.heads] == [AUTHORIZATION]
        assert [request.header("proxy-authorization") for request in receiver.requests] == [None]


async def test_check_asks_the_proxy_too_and_posts_nothing() -> None:
    with Receiver() as receiver:
        async with proxying() as proxy:
            sink = a_sink(receiver.url, proxy=proxy.url)
            assert await sink.check() is None
            proxy.answer = head(403)
            assert await sink.check() == "proxy_error: the proxy answered 403 Forbidden"
            assert len(proxy.asked) == 2
        assert receiver.requests == []
