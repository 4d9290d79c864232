"""The receiver of the tests records what came, verifies it and misbehaves as told."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from standardwebhooks import Webhook

from tests.support.receiver import Behaviour, Receiver, Request
from tests.support.receiver.answers import in_turn, raw, say
from tests.support.receiver.certificates import Authority
from tests.support.receiver.fault_modes import hangs_once
from tests.support.receiver.faults import close, half_handshake, hang, reset
from tests.support.receiver.process import ReceiverProcess
from tests.support.receiver.signatures import SECRET, problem
from tests.support.wait import until


def signed(uid: str, body: bytes, secret: str = SECRET) -> dict[str, str]:
    """Return headers as a sender makes them."""
    now = datetime.now(UTC)
    signature = Webhook(secret).sign(uid, now, body.decode())
    return {"webhook-id": uid, "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signature}


async def post(url: str, body: bytes, headers: dict[str, str], context: ssl.SSLContext | bool = True) -> int:
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers, ssl=context) as answer:
        return answer.status


async def test_requests_are_recorded_as_they_came_and_a_wrong_signature_shows() -> None:
    with Receiver(in_turn(say(500), say(200))) as receiver:
        assert await post(receiver.url, b"one", signed("a", b"one")) == 500
        assert await post(receiver.url, b"two", signed("b", b"2")) == 200
    assert [(request.uid, request.body) for request in receiver.requests] == [("a", b"one"), ("b", b"two")]
    assert [request.uid for request in receiver.unverified] == ["b"]
    assert ("Content-Length", "3") in receiver.requests[0].headers


@pytest.mark.parametrize("body", [b"", "ключ".encode()])
def test_a_signature_verifies_with_its_own_secret_alone(body: bytes) -> None:
    request = Request(1, 1, headers=tuple(signed("a", body).items()), body=body)
    assert problem(request, ["whsec_" + "A" * 32, SECRET]) is None
    assert problem(request, ["whsec_" + "A" * 32]) is not None


def test_a_signature_of_bytes_that_are_no_text_verifies_too() -> None:
    """Vector: the key of the tests over the bytes 0 to 255."""
    vector = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,sEcZ042G8Crqgxbybb3y0eDxQR3TcfYsk11I1XULhSI=",
    }
    assert problem(Request(1, 1, headers=tuple(vector.items()), body=bytes(range(256))), [SECRET]) is None
    assert problem(Request(1, 1, headers=tuple(vector.items()), body=bytes(range(255))), [SECRET]) is not None


@pytest.mark.parametrize("misbehaviour", [close, reset, raw(b"nonsense\r\n\r\n", close=True)])
async def test_a_client_notices_misbehaviour(misbehaviour: Behaviour) -> None:
    with Receiver(misbehaviour) as receiver:
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await post(receiver.url, b"x", signed("a", b"x"))
        assert receiver.uids[0] == "a"


async def test_what_hangs_ends_with_the_receiver() -> None:
    with Receiver(hang) as receiver:
        under_way = asyncio.ensure_future(post(receiver.url, b"x", signed("a", b"x")))
        await asyncio.to_thread(until, lambda: receiver.requests, seconds=5, what="the request is there")
        assert not under_way.done()
        await asyncio.to_thread(receiver.stop)
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await under_way


async def test_tls_is_real(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=authority.certificate_file)
    with Receiver(tls=authority.good()) as receiver:
        assert await post(receiver.url, b"x", signed("a", b"x"), trusting) == 200
    for bad in (authority.expired(), authority.wrong_host(), authority.self_signed(), authority.tls_1_0()):
        with Receiver(tls=bad) as receiver:
            with pytest.raises(aiohttp.ClientConnectorError):
                await post(receiver.url, b"x", {}, trusting)
            assert receiver.requests == []


async def test_an_old_client_reaches_the_old_server(tmp_path: Path) -> None:
    """So it is the version that is refused, not something else."""
    authority = Authority(tmp_path)
    old = ssl.create_default_context(cafile=authority.certificate_file)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version = ssl.TLSVersion.TLSv1
    with Receiver(tls=authority.tls_1_0()) as receiver:
        assert await post(receiver.url, b"x", signed("a", b"x"), old) == 200


async def test_a_client_certificate_is_asked_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Receiver(tls=authority.asks_for_certificate()) as receiver:
        statuses: list[int | str] = []
        for kind in ("good", "expired", "unknown"):
            context = ssl.create_default_context(cafile=authority.certificate_file)
            context.load_cert_chain(*authority.client_files(kind))
            try:
                statuses.append(await post(receiver.url, b"x", signed(kind, b"x"), context))
            except (aiohttp.ClientError, OSError):
                statuses.append("refused")
        assert statuses == [200, "refused", "refused"]
        assert receiver.uids == ["good"]
        assert receiver.requests[0].peer


async def test_a_handshake_stalls_half_way(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    trusting = ssl.create_default_context(cafile=authority.certificate_file)
    with Receiver(at_accept=half_handshake(authority.good())) as receiver:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await post(receiver.url.replace("http:", "https:"), b"x", {}, trusting)
        assert receiver.connections == 1


async def _all(url: str, uids: Sequence[str]) -> list[int]:
    return [await post(url, b"{}", signed(uid, b"{}")) for uid in uids]


def test_the_process_writes_a_line_per_request_and_has_the_same_whims_each_time(tmp_path: Path) -> None:
    uids = [uid for uid in (f"uid-{n}" for n in range(140)) if not hangs_once(uid)][:120]
    with ReceiverProcess(tmp_path, "--fault-modes") as receiver:
        statuses = asyncio.run(_all(receiver.url, uids))
        until(lambda: len(list(receiver.arrivals())) == 120, seconds=5, what="everything is in the log")
    arrivals = list(receiver.arrivals())
    assert [arrival.uid for arrival in arrivals] == uids
    assert [arrival.answer for arrival in arrivals] == [str(status) for status in statuses]
    assert {200, 400, 500} == set(statuses)
    assert {(arrival.problem, arrival.payload) for arrival in arrivals} == {("", b"{}")}
