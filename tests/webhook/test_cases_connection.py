"""Connections that are not made, break or lie: what was not sent counts no attempt, what may have arrived does."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable
from outbox_relay.sinks.tls import trusting
from tests.support.ports import LOOPBACK, free_port, unanswering_port
from tests.support.receiver import Behaviour, Receiver
from tests.support.receiver.answers import head, raw
from tests.support.receiver.certificates import Authority, plain_files
from tests.support.receiver.faults import close, half_handshake, hang, reset, then
from tests.support.webhook_sink import QUICK_SECONDS, code, outcome

STALLED = {"connect_timeout", "deadline"}
BROKEN = {"disconnected", "connection_reset", "protocol_error"}


async def test_case_30_a_refused_connection_counts_no_attempt() -> None:
    found = await outcome(f"http://{LOOPBACK}:{free_port()}/")
    assert isinstance(found, Unavailable)
    assert code(found) == "connection_refused"


async def test_case_31_a_connection_that_is_never_made_counts_no_attempt() -> None:
    with unanswering_port() as port:
        found = await outcome(f"http://{LOOPBACK}:{port}/", timeout_seconds=QUICK_SECONDS)
    assert isinstance(found, Unavailable)
    assert code(found) in STALLED


async def test_case_32_accepted_and_then_silent_is_a_failed_attempt() -> None:
    with Receiver(at_accept=hang) as receiver:
        found = await outcome(receiver.url, timeout_seconds=QUICK_SECONDS)
        assert receiver.connections == 1
    assert isinstance(found, Failed)
    assert code(found) == "read_timeout"


async def test_case_33_tls_to_a_plain_port_counts_no_attempt(authority: Authority) -> None:
    plain = raw(head(400, [("content-length", "0"), ("connection", "close")]), close=True)
    with Receiver(at_accept=plain) as receiver:
        found = await outcome(receiver.url.replace("http:", "https:"), ca_file=authority.certificate_file)
    assert isinstance(found, Unavailable)
    assert code(found) == "tls_error"


async def test_case_33_plain_to_a_tls_port_is_a_failed_attempt(authority: Authority) -> None:
    with Receiver(tls=authority.good()) as receiver:
        found = await outcome(receiver.url.replace("https:", "http:"))
        assert receiver.requests == []
    assert isinstance(found, Failed)
    assert code(found) in BROKEN


async def test_a_good_certificate_is_taken_and_one_of_an_unknown_authority_is_not(authority: Authority) -> None:
    with Receiver(tls=authority.good()) as receiver:
        assert await outcome(receiver.url, ca_file=authority.certificate_file) == DELIVERED
        found = await outcome(receiver.url)
        assert isinstance(found, Unavailable)
        assert code(found) == "tls_error"
        assert len(receiver.requests) == 1


@pytest.fixture(params=[0, ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN], ids=["3.11", "3.13"])
def defaults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default of TLS contexts be that of a version of Python."""
    original = ssl.create_default_context

    def create(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = original(*arguments, **options)
        context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST | request.param
        return context

    monkeypatch.setattr(ssl, "create_default_context", create)


@pytest.mark.usefixtures("defaults")
async def test_a_private_authority_without_key_identifiers_is_trusted_on_every_python(tmp_path: Path) -> None:
    root, leaf = plain_files(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(leaf)
    with Receiver(tls=server) as receiver:
        assert await outcome(receiver.url, ca_file=root) == DELIVERED
    assert not trusting(root).verify_flags & ssl.VERIFY_X509_STRICT


async def test_an_authority_whose_own_issuer_is_missing_is_trusted(authority: Authority, tmp_path: Path) -> None:
    file, server = authority.intermediate(tmp_path)
    with Receiver(tls=server) as receiver:
        assert await outcome(receiver.url, ca_file=file) == DELIVERED


REASONS = {
    "expired": "the certificate is not accepted: certificate has expired",
    "self_signed": "local issuer certificate: its authority is not one that the sink trusts (ca_file, or the system's)",
    "wrong_host": "IP address mismatch, certificate is not valid for '127.0.0.1'",
    "tls_1_0": "the TLS handshake ",
}


@pytest.mark.parametrize("kind", REASONS)
async def test_case_34_a_bad_certificate_or_an_old_protocol_is_refused_before_anything_is_sent(
    authority: Authority, kind: str
) -> None:
    with Receiver(tls=getattr(authority, kind)()) as receiver:
        found = await outcome(receiver.url, ca_file=authority.certificate_file)
        assert receiver.requests == []
    assert isinstance(found, Unavailable)
    assert code(found) == "tls_error"
    assert REASONS[kind] in found.reason


@pytest.mark.parametrize("kind", ["none", "expired", "unknown"])
async def test_case_35_without_a_good_client_certificate_nothing_arrives(authority: Authority, kind: str) -> None:
    """With TLS 1.3 the server says so only after the client's side of the handshake is over, so it may count."""
    changes: dict[str, Any] = {"ca_file": authority.certificate_file}
    if kind != "none":
        certificate, key = authority.client_files(kind)
        changes |= {"client_certificate": certificate, "client_key": key}
    with Receiver(tls=authority.asks_for_certificate()) as receiver:
        found = await outcome(receiver.url, **changes)
        assert receiver.requests == []
    assert isinstance(found, Unavailable | Failed)
    assert code(found) in {"tls_error", *BROKEN}


async def test_case_36_a_stall_inside_the_handshake_counts_no_attempt(authority: Authority) -> None:
    with Receiver(at_accept=half_handshake(authority.good())) as receiver:
        url = receiver.url.replace("http:", "https:")
        found = await outcome(url, ca_file=authority.certificate_file, timeout_seconds=QUICK_SECONDS)
        assert receiver.connections == 1
    assert isinstance(found, Unavailable)
    assert code(found) in STALLED


async def test_case_37_closed_at_accept() -> None:
    with Receiver(at_accept=close) as receiver:
        found = await outcome(receiver.url)
        assert receiver.connections == 1
    assert isinstance(found, Failed | Unavailable)
    assert code(found) in BROKEN


RESETS: dict[str, Behaviour] = {
    "before the answer": reset,
    "during the status line": then(raw(b"HTTP/1.1 20"), reset),
    "during the headers": then(raw(b"HTTP/1.1 200 OK\r\nx-a: b"), reset),
    "before the headers end": then(raw(b"HTTP/1.1 200 OK\r\nx-a: b\r\n"), reset),
    "closed during the headers": then(raw(b"HTTP/1.1 200 OK\r\nx-a: b\r\n"), close),
    "closed without an answer": close,
}


@pytest.mark.parametrize("answer", RESETS.values(), ids=[f"case 38: {name}" for name in RESETS])
async def test_a_connection_that_breaks_after_sending_is_a_failed_attempt(answer: Behaviour) -> None:
    with Receiver(answer) as receiver:
        found = await outcome(receiver.url)
        assert len(receiver.requests) == 1
    assert isinstance(found, Failed)
    assert code(found) in BROKEN


@pytest.mark.parametrize(("status", "delivered"), [(200, True), (500, False)])
async def test_case_38_a_reset_in_the_body_changes_nothing_that_the_status_said(
    status: int, *, delivered: bool
) -> None:
    answer = then(raw(head(status, [("content-length", "100")]) + b"x"), reset)
    with Receiver(answer) as receiver:
        found = await outcome(receiver.url)
        assert len(receiver.requests) == 1
    assert (found == DELIVERED) is delivered
    assert code(found) == ("" if delivered else "http_500")
