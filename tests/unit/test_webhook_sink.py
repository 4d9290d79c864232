"""The webhook sink on real connections: what it sends, what it makes of answers, and what changes while it runs."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.formats.signatures import parse_key
from outbox_relay.settings.addresses import denied
from outbox_relay.sinks.webhook import Credentials, Endpoint, RequestFormat, ResponsePolicy, Tls, WebhookSink
from outbox_relay.sinks.webhook.sink import ALL_ENDED, LATE
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.certificates import Authority
from tests.support.receiver.faults import close
from tests.support.receiver.signatures import SECRET, problem

OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()
TOKEN = "Bearer hunter2-canary/token"
CREDENTIALS = Credentials([parse_key(SECRET)])


def an_event(payload: bytes = b'{"id": 1}', headers: str | None = None) -> StoredEvent:
    """Return an event of the log."""
    uid = "019a0000-0000-7000-8000-000000000001"
    return StoredEvent(1, 0, uid, "order.created", "k", payload, "application/json", headers, None, datetime.now(UTC))


def soon() -> float:
    """Return a deadline that nothing meets."""
    return time.monotonic() + 60


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def sink_to(url: str, credentials: Credentials = CREDENTIALS, policy: ResponsePolicy | None = None) -> WebhookSink:
    """Return a sink that may connect to the loopback address."""
    return WebhookSink("crm", Endpoint(url, lambda _: None), credentials, policy=policy, timeout_seconds=5)


async def delivered(sink: WebhookSink, event: StoredEvent | None = None, *, attempt: int = 0) -> Verdict:
    """Return the verdict of one event, from a sink that is open for it alone."""
    await sink.open()
    try:
        [verdict] = await sink.deliver([event or an_event()], soon(), attempt)
    finally:
        await sink.close()
    return verdict


async def test_an_event_arrives_signed_with_the_number_of_the_attempt(receiver: Receiver) -> None:
    assert await delivered(sink_to(receiver.url), attempt=7) == DELIVERED
    [request] = receiver.requests
    assert (request.problem, request.header("outbox-attempt"), request.body) == (None, "7", b'{"id": 1}')
    assert request.header("host") == f"127.0.0.1:{receiver.port}"
    assert request.header("content-length") == "9"
    assert len(request.headers) == len({name.lower() for name, _ in request.headers})


@pytest.mark.parametrize(
    ("delivery_details", "attempt", "status"), [(False, 0, None), (False, 1, 200), (False, 2, 200), (True, 0, 200)]
)
async def test_a_delivery_has_status_and_duration_if_its_attempt_is_recorded(
    receiver: Receiver, delivery_details: bool, attempt: int, status: int | None
) -> None:
    endpoint = Endpoint(receiver.url, lambda _: None)
    sink = WebhookSink("crm", endpoint, CREDENTIALS, delivery_details=delivery_details)
    found = await delivered(sink, attempt=attempt)
    assert isinstance(found, Delivered)
    assert receiver.requests[0].header("outbox-attempt") == str(max(attempt, 1))
    assert (found is DELIVERED) == (status is None)
    assert (found.status, found.seconds is None, found.detail) == (status, status is None, None)


async def test_the_connection_adds_no_header_of_its_own(receiver: Receiver) -> None:
    await delivered(sink_to(receiver.url))
    assert {name.lower() for name, _ in receiver.requests[0].headers} == {
        *("host", "content-length", "content-type", "user-agent", "accept", "accept-encoding", "idempotency-key"),
        *("webhook-id", "webhook-timestamp", "webhook-signature", "outbox-type", "outbox-key", "outbox-attempt"),
    }


async def test_nothing_is_sent_at_or_after_the_deadline(receiver: Receiver) -> None:
    sink = sink_to(receiver.url)
    await sink.open()
    assert await sink.deliver([an_event()], time.monotonic()) == [LATE]
    await sink.close()
    assert receiver.requests == []


async def test_nothing_is_sent_unsigned(receiver: Receiver) -> None:
    sink = sink_to(receiver.url, Credentials([parse_key(SECRET, datetime.now(UTC) - timedelta(seconds=1))]))
    assert await delivered(sink) == Unavailable(ALL_ENDED, attempt=Attempt("config_error"))
    assert await sink.check() == ALL_ENDED
    assert receiver.connections == 0


async def test_an_event_whose_headers_cannot_be_read_is_refused(receiver: Receiver) -> None:
    verdict = await delivered(sink_to(receiver.url), an_event(headers="[]"))
    assert verdict == Refused("the event's headers are not a JSON object of strings", attempt=Attempt("config_error"))
    assert receiver.connections == 0


async def test_while_secrets_change_both_receivers_verify(receiver: Receiver) -> None:
    ends = datetime.now(UTC) + timedelta(hours=1)
    await delivered(sink_to(receiver.url, Credentials([parse_key(OTHER), parse_key(SECRET, ends)])))
    [request] = receiver.requests
    assert [problem(request, [secret]) for secret in (OTHER, SECRET)] == [None, None]


async def test_an_event_whose_request_cannot_be_made_is_refused_without_its_text(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise KeyError("a piece of the payload")

    monkeypatch.setattr("outbox_relay.sinks.webhook.sink.make_request", broken)
    verdict = await delivered(sink_to(receiver.url))
    reason = "the event cannot be made into a request (KeyError)"
    assert verdict == Refused(reason, attempt=Attempt("config_error"))


def echo(request: Request) -> Behaviour:
    """Return a behaviour that answers with every header of the request, as frameworks in debug mode do."""
    return say(500, body=json.dumps({"got": request.headers, "path": request.target}).encode())


async def test_an_answer_that_repeats_our_headers_shows_no_secret(receiver: Receiver) -> None:
    receiver.answer = chosen(echo)
    credentials = Credentials([parse_key(SECRET)], {"authorization": TOKEN})
    found = await delivered(sink_to(f"{receiver.url}?token=query-canary", credentials))
    assert isinstance(found, Failed)
    assert found.attempt is not None
    assert found.attempt.answer is not None
    assert '"outbox-type", "order.created"' in found.attempt.answer
    [request] = receiver.requests
    signature = (request.header("webhook-signature") or "").removeprefix("v1,")
    for canary in ("hunter2-canary", "query-canary", signature):
        assert canary not in repr(found)


def in_lower_case(text: str) -> str:
    """Return ``text`` percent-encoded as some frameworks do it."""
    return re.sub("%..", lambda found: found[0].lower(), quote(text))


@pytest.mark.parametrize("encode", [json.dumps, in_lower_case])
async def test_an_answer_that_repeats_the_events_key_and_headers_shows_none_of_them(
    receiver: Receiver, encode: Callable[[str], str]
) -> None:
    canaries = ["canary+Key/1@example.com", "canary of a forwarded header", "canary-Zoë-日本"]
    answer = " ".join(["no such customer:", *map(encode, canaries)])
    receiver.answer = say(500, body=answer.encode())
    event = an_event(headers=json.dumps({"x-tenant": canaries[1], "x-name": canaries[2]}))._replace(key=canaries[0])
    request_format = RequestFormat(forward=frozenset(("x-tenant", "x-name")))
    sink = WebhookSink(
        "crm", Endpoint(receiver.url, lambda _: None), CREDENTIALS, request_format=request_format, timeout_seconds=5
    )
    found = await delivered(sink, event)
    assert isinstance(found, Failed)
    assert found.attempt is not None
    shown = (found.attempt.answer or "").replace('"', "")
    assert shown == "no such customer: [redacted] [redacted] [redacted]"


async def test_an_answer_that_repeats_the_payload_is_left_out(receiver: Receiver) -> None:
    receiver.answer = chosen(lambda request: say(500, body=b"cannot take " + request.body))
    found = await delivered(sink_to(receiver.url), an_event(b'{"card": "4111 1111 1111 1111"}'))
    assert isinstance(found, Failed)
    assert found.attempt is not None
    assert found.attempt.answer == "[left out: it repeats the payload]"


def test_a_sink_shows_nothing_of_its_secrets(receiver: Receiver) -> None:
    credentials = Credentials([parse_key(SECRET)], {"authorization": TOKEN})
    endpoint = Endpoint(f"{receiver.url}?token=query-canary", lambda _: None)
    shown = f"{sink_to(endpoint.url, credentials)!r} {endpoint!r} {credentials!r}"
    for canary in ("canary", SECRET.removeprefix("whsec_")):
        assert canary not in shown


class TestCheck:
    """Checks of a destination, which post nothing."""

    async def test_a_destination_that_is_up_passes_and_gets_no_request(self, receiver: Receiver) -> None:
        assert await sink_to(receiver.url).check() is None
        assert receiver.requests == []

    async def test_a_private_address_is_not_dialled(self, receiver: Receiver) -> None:
        sink = WebhookSink("crm", Endpoint(receiver.url, lambda address: denied(address, ())), CREDENTIALS)
        assert (await sink.check() or "").startswith("ssrf_blocked: ")
        assert receiver.connections == 0

    async def test_the_relays_own_port_is_not_dialled(self, receiver: Receiver) -> None:
        own = [("0.0.0.0", receiver.port)]  # noqa: S104 - nothing binds here
        sink = WebhookSink("crm", Endpoint(receiver.url, lambda _: None, lambda: own), CREDENTIALS)
        assert (await sink.check() or "").startswith("ssrf_blocked: ")
        verdict = await delivered(sink)
        assert isinstance(verdict, Unavailable)
        assert receiver.connections == 0

    async def test_a_certificate_of_an_unknown_authority(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        with Receiver(tls=authority.good()) as receiver:
            assert (await sink_to(receiver.url).check() or "").startswith("tls_error: ")
            sink = WebhookSink(
                "crm",
                Endpoint(receiver.url, lambda _: None, tls=Tls(authority.certificate_file).context()),
                CREDENTIALS,
            )
            assert await sink.check() is None
            assert await delivered(sink) is DELIVERED

    @pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
    async def test_a_client_certificate_that_is_asked_for(self, tmp_path: Path, version: str) -> None:
        """With TLS 1.3 the handshake is over for the relay before the server has looked for a certificate."""
        authority = Authority(tmp_path)
        context = authority.asks_for_certificate()
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        with shaking_hands(context) as port:
            for files in (), authority.client_files("expired"):
                found = await checked(port, Tls(authority.certificate_file, *files))
                assert (found or "").startswith("tls_error: ")
            assert await checked(port, Tls(authority.certificate_file, *authority.client_files())) is None

    async def test_a_connection_that_is_closed_behind_the_handshake(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        with Receiver(at_accept=close, tls=authority.good()) as receiver:
            found = await checked(receiver.port, Tls(authority.certificate_file))
            assert (found or "").startswith("disconnected: ")


@contextmanager
def shaking_hands(context: ssl.SSLContext) -> Generator[int]:
    """Yield a port that completes handshakes and then is silent; unlike the receiver it sends its alert at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    accepted, _ = listening.accept()
                    with suppress(OSError), context.wrap_socket(accepted, server_side=True) as secure:
                        secure.recv(1)

        thread.submit(accept)
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


async def checked(port: int, tls: Tls) -> str | None:
    """Return the check of a sink with these files for this port."""
    endpoint = Endpoint(f"https://127.0.0.1:{port}/", lambda _: None, tls=tls.context())
    found = await WebhookSink("crm", endpoint, CREDENTIALS).check()
    await asyncio.sleep(0)  # the event loop closes the connection in its next turn
    return found


class TestTls:
    """Certificates from files."""

    def test_a_key_may_stand_in_the_same_file(self, tmp_path: Path) -> None:
        certificate, private = Authority(tmp_path).client_files()
        certificate.write_bytes(certificate.read_bytes() + private.read_bytes())
        Tls(client_certificate=certificate).context()

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ((None, "junk", None), "client_certificate DIR/junk: holds nothing in PEM that fits"),
            ((None, "gone", None), "client_certificate DIR/gone: No such file or directory"),
            ((None, "good", "gone"), "client_certificate DIR/good or client_key DIR/gone: No such file or directory"),
            ((None, "good", "other"), "client_certificate DIR/good or client_key DIR/other: key values mismatch"),
            ((None, "good", "locked"), "or client_key DIR/locked: the key is encrypted"),
            (("junk", None, None), "ca_file DIR/junk: no certificate or crl found"),
            (("gone", None, None), "ca_file DIR/gone: No such file or directory"),
        ],
    )
    def test_files_that_cannot_be_used_are_named(
        self, tmp_path: Path, files: tuple[str | None, str | None, str | None], said: str
    ) -> None:
        authority = Authority(tmp_path)
        (tmp_path / "good").write_bytes(authority.client_files()[0].read_bytes())
        (tmp_path / "other").write_bytes(authority.client_files("unknown")[1].read_bytes())
        (tmp_path / "locked").write_bytes(LOCKED)
        (tmp_path / "junk").write_text("hunter2")
        tls = Tls(*(tmp_path / name if name else None for name in files))
        with pytest.raises(ValueError, match=r"client_|ca_file") as refused:
            tls.context()
        assert said.replace("DIR", str(tmp_path)) in str(refused.value)
        assert "hunter2" not in str(refused.value)


def _locked() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


LOCKED = _locked()


@pytest.mark.fence("a webhook gets its connection too late")
async def test_a_request_that_is_ready_to_be_sent_too_late_is_not_sent(receiver: Receiver) -> None:
    """The thread may stand still between the look at the clock and the connection: here, as it judges addresses."""
    sink = WebhookSink("crm", Endpoint(receiver.url, lambda _: time.sleep(0.3)), CREDENTIALS)
    await sink.open()
    [late] = await sink.deliver([an_event()], time.monotonic() + 0.2)
    assert isinstance(late, Unavailable)
    assert receiver.requests == []
    assert await sink.deliver([an_event()], soon()) == [DELIVERED]
    await sink.close()
