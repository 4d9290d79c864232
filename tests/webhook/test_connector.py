"""From a name to a connection: what is looked up, what is judged, what is dialled, and whose certificate is accepted.

Name servers are the one fake here; see `tests.support.names`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
from collections.abc import Generator

import pytest

from outbox_relay.sinks.webhook import connector, resolver
from outbox_relay.sinks.webhook.response import NoResponse, Response
from tests.support.names import NO_SUCH_NAME, SERVER_FAILED, Names
from tests.support.ports import LOOPBACK, free_port, unanswering_port
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.certificates import NAME, Authority
from tests.support.receiver.faults import close, half_handshake, hang, stale, then
from tests.support.wait import until
from tests.support.webhook_client import (
    LATE_SECONDS,
    QUICK_SECONDS,
    a_response,
    fenced,
    no_response,
    outcome,
    post,
    posting,
    trusting,
)

SECOND = "127.0.0.2"
one_each = then(say(200, ("connection", "close")), close)
"""An answer that ends its connection, and says so: the next request needs a new one."""


def only_first(address: str) -> str | None:
    """Refuse every address but that of this machine."""
    return None if address == LOOPBACK else "another"


@pytest.fixture
def black_hole() -> Generator[int]:
    with unanswering_port() as port:
        yield port


# Addresses.


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fd00::1"])
async def test_a_name_that_stands_for_a_private_address_is_not_dialled(names: Names, address: str) -> None:
    names.say(NAME, [address])
    fault = no_response(await outcome(f"http://{NAME}:9/", judge=fenced), "ssrf_blocked", sent=False)
    assert address not in fault.reason


@pytest.mark.parametrize("address", ["10.0.0.1", "[::1]", "[::ffff:7f00:1]", "169.254.169.254"])
async def test_an_address_in_the_url_is_judged_too(address: str) -> None:
    no_response(await outcome(f"http://{address}:9/", judge=fenced), "ssrf_blocked", sent=False)


@pytest.mark.parametrize("place", [0, 1, 499])
async def test_one_private_address_among_others_is_enough(names: Names, place: int) -> None:
    addresses = [f"93.184.{n // 250}.{n % 250 + 1}" for n in range(max(2, place))]
    names.say(NAME, [*addresses[:place], "10.0.0.1", *addresses[place:]])
    no_response(await outcome(f"http://{NAME}:9/", judge=fenced), "ssrf_blocked", sent=False)


async def test_a_name_with_more_addresses_than_are_judged_is_not_dialled(names: Names) -> None:
    names.say(NAME, [f"93.{n // 65536}.{n // 256 % 256}.{n % 256}" for n in range(resolver.ADDRESSES + 1)])
    no_response(await outcome(f"http://{NAME}:9/", judge=fenced), "dns_error", sent=False)


async def test_a_name_that_moves_inside_is_judged_again_for_the_next_connection(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "KEPT_SECONDS", 0.0)
    names.in_turn(NAME, [LOOPBACK], [SECOND])
    with Receiver(one_each, secrets=()) as receiver:
        async with posting(receiver.url_of(NAME), judge=only_first) as client:
            assert a_response(await post(client)).status == 200
            no_response(await post(client), "ssrf_blocked", sent=False)
    assert names.asked[NAME] == 2


async def test_a_kept_answer_of_the_name_server_is_judged_again(names: Names) -> None:
    """The settings may change which addresses are dialled."""
    allowed = {LOOPBACK}
    names.say(NAME, [LOOPBACK])
    with Receiver(one_each, secrets=()) as receiver:
        judge = {True: None, False: "not listed"}
        async with posting(receiver.url_of(NAME), judge=lambda address: judge[address in allowed]) as client:
            assert a_response(await post(client)).status == 200
            allowed.clear()
            no_response(await post(client), "ssrf_blocked", sent=False)


@pytest.mark.parametrize("host", [LOOPBACK, NAME, "[::ffff:127.0.0.1]"], ids=["address", "name", "in an IPv6 address"])
@pytest.mark.parametrize("own", [LOOPBACK, "0.0.0.0", "::ffff:127.0.0.1"], ids=["itself", "any", "mapped"])  # noqa: S104
async def test_what_is_the_relays_own_is_not_dialled_whatever_is_allowed(names: Names, host: str, own: str) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        url = f"http://{host}:{receiver.port}/"
        no_response(await outcome(url, own=[("10.9.9.9", 5432), (own, receiver.port)]), "ssrf_blocked", sent=False)
        assert a_response(await outcome(url, own=[(own, receiver.port + 1)])).status == 200
        assert receiver.connections == 1


async def test_a_host_that_is_the_relays_own_by_name_is_not_dialled(names: Names) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        own = [(f"{NAME.upper()}.", receiver.port)]
        no_response(await outcome(receiver.url_of(NAME), own=own), "ssrf_blocked", sent=False)
        assert receiver.connections == 0


async def test_another_machine_is_not_this_one(names: Names) -> None:
    """A wildcard among the relay's own addresses covers those of this machine only."""
    names.say(NAME, ["192.0.2.1"])
    found = await outcome(f"http://{NAME}:9/", own=[("0.0.0.0", 9)], seconds=QUICK_SECONDS)  # noqa: S104
    assert isinstance(found, NoResponse)
    assert found.code != "ssrf_blocked"


async def test_the_system_is_asked_where_the_connection_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the peer is a second fence: only a dial that goes wrong meets it, so the dial is replaced."""
    with Receiver(secrets=()) as receiver, Receiver(host=SECOND, secrets=()) as inner:

        async def elsewhere(*_: object, **__: object) -> socket.socket:
            connected = socket.create_connection((SECOND, inner.port))
            connected.setblocking(False)
            return connected

        monkeypatch.setattr(connector, "start_connection", elsewhere)
        no_response(await outcome(receiver.url), "ssrf_blocked", sent=False)
        await asyncio.to_thread(
            until, lambda: inner.connections == 1 and not inner.open, seconds=5, what="it is closed"
        )
        assert inner.requests == []


# Names.


@pytest.mark.parametrize(
    "answer", [NO_SUCH_NAME, SERVER_FAILED, [], ["not an address"], UnicodeError("label too long")]
)
async def test_a_name_without_addresses_is_a_fault(names: Names, answer: list[str] | BaseException) -> None:
    names.say(NAME, answer)
    fault = no_response(await outcome(f"http://{NAME}:9/", judge=fenced), "dns_error", sent=False)
    assert "not an address" not in fault.reason


async def test_a_failed_lookup_is_not_repeated_at_once(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async with posting(f"http://{NAME}:9/") as client:
        for _ in range(3):
            no_response(await post(client), "dns_error", sent=False)
        assert names.asked[NAME] == 1
        monkeypatch.setattr(resolver, "FAILED_SECONDS", 0.0)
        await client.close()
        await client.open()
        for _ in range(2):
            no_response(await post(client), "dns_error", sent=False)
        assert names.asked[NAME] == 3


async def test_one_lookup_serves_all_who_wait_for_it(names: Names) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url_of(NAME), connections=20) as client:
            found = await asyncio.gather(*(post(client) for _ in range(20)))
            assert {a_response(each).status for each in found} == {200}
            assert [name for name, _ in a_response(found[0]).timings] == ["dns", "connect", "first_byte"]
        assert names.asked[NAME] == 1


async def test_a_name_server_that_hangs_ends_with_the_limit_and_never_takes_more_than_two_threads(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(resolver, "FAILED_SECONDS", 0.0)
    names.hang(NAME)
    before = threading.active_count()
    async with posting(f"http://{NAME}:9/") as client:
        for _ in range(5):
            no_response(await post(client), "dns_timeout", sent=False)
        assert names.asked[NAME] == resolver.LOOKUPS
        assert threading.active_count() <= before + resolver.LOOKUPS
        names.say(NAME, NO_SUCH_NAME)
        names.release()


async def test_the_time_of_a_lookup_does_not_count_toward_the_limit_of_the_request(names: Names) -> None:
    """As with a first name server that is dead: the second one answers after 5 s."""
    answers = threading.Event()

    def late() -> list[str]:
        answers.wait(10)
        return [LOOPBACK]

    names.say(NAME, late)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url_of(NAME)) as client:
            sent = asyncio.ensure_future(post(client, seconds=2.0))
            await asyncio.wait({sent}, timeout=2.5)
            assert not sent.done()
            answers.set()
            assert a_response(await sent).status == 200


async def test_after_a_lookup_the_limit_of_the_request_holds(names: Names) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(hang, secrets=()) as receiver:
        found = await outcome(receiver.url_of(NAME), seconds=QUICK_SECONDS)
        assert no_response(found, "read_timeout", sent=True).seconds < LATE_SECONDS


async def test_a_reset_ends_a_request_whose_name_is_looked_up(names: Names) -> None:
    names.hang(NAME)
    async with posting(f"http://{NAME}:9/") as client:
        sent = asyncio.ensure_future(post(client))
        await asyncio.to_thread(until, lambda: names.asked[NAME] == 1, seconds=5, what="the name is looked up")
        await client.reset()
        assert no_response(await sent, "withdrawn", sent=False).seconds < LATE_SECONDS


async def test_dead_names_do_not_delay_a_healthy_one(names: Names) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        dead: list[asyncio.Future[Response | NoResponse]] = []
        for n in range(40):
            names.hang(f"dead-{n}.test")
            dead.append(asyncio.ensure_future(outcome(f"http://dead-{n}.test/", seconds=5)))
        await asyncio.sleep(0.01)
        found = a_response(await outcome(receiver.url_of(NAME)))
        assert not any(each.done() for each in dead)
        assert found.status == 200
        for each in dead:
            each.cancel()
        await asyncio.gather(*dead, return_exceptions=True)


async def test_who_stops_waiting_for_a_lookup_leaves_it_to_the_others(names: Names) -> None:
    released = threading.Event()

    def late() -> list[str]:
        released.wait(10)
        return [LOOPBACK]

    names.say(NAME, late)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url_of(NAME)) as client:
            first, second = (asyncio.ensure_future(post(client)) for _ in range(2))
            await asyncio.to_thread(until, lambda: names.asked[NAME], seconds=5, what="the lookup has begun")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            released.set()
            assert a_response(await second).status == 200
        assert names.asked[NAME] == 1


HANGING = """
import asyncio, socket, time
from outbox_relay.sinks.webhook.client import HttpClient

async def main():
    client = HttpClient(url="http://hangs.test/", denied=lambda _: None, max_connections=1)
    await client.open()
    print((await client.post([], b"", 0.1)).code)
    await client.close()

socket.getaddrinfo = lambda *_, **__: time.sleep(120)
asyncio.run(main())
"""


async def test_a_lookup_that_hangs_does_not_keep_the_process() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGING, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert told == b"dns_timeout\n"


async def test_an_answer_that_comes_late_serves_the_next_request(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "LOOKUP_SECONDS", 0.1)
    released = threading.Event()

    def late() -> list[str]:
        released.wait(10)
        return [LOOPBACK]

    names.say(NAME, late)
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url_of(NAME)) as client:
            no_response(await post(client), "dns_timeout", sent=False)
            released.set()
            found = await post(client)
            while isinstance(found, NoResponse):
                await asyncio.sleep(0.01)
                found = await post(client)
            assert found.status == 200
        assert names.asked[NAME] == 1


# Connections.


async def test_nobody_listens() -> None:
    no_response(await outcome(f"http://{LOOPBACK}:{free_port()}/"), "connection_refused", sent=False)


async def test_the_total_limit_ends_a_connection_that_is_never_made(black_hole: int) -> None:
    found = await outcome(f"http://{LOOPBACK}:{black_hole}/", seconds=QUICK_SECONDS)
    assert no_response(found, "connect_timeout", sent=False).seconds < LATE_SECONDS


async def test_a_connection_has_a_limit_of_its_own(black_hole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "CONNECT_SECONDS", 0.2)
    assert no_response(await outcome(f"http://{LOOPBACK}:{black_hole}/"), "connect_timeout", sent=False).seconds < 2


async def test_an_address_that_does_not_answer_does_not_stop_the_next_one(names: Names) -> None:
    names.say(NAME, ["127.0.0.9", "::1", LOOPBACK])
    with Receiver(secrets=()) as receiver:
        assert a_response(await outcome(receiver.url_of(NAME))).status == 200


async def test_only_so_many_addresses_of_a_name_are_tried(names: Names) -> None:
    names.say(NAME, [*(f"127.0.1.{n + 1}" for n in range(connector.DIALLED)), LOOPBACK])
    with Receiver(secrets=()) as receiver:
        no_response(await outcome(receiver.url_of(NAME)), "connection_refused", sent=False)
        assert receiver.connections == 0


NO_WAY = [errno.ENETUNREACH, errno.EADDRNOTAVAIL]
"""From a machine without IPv6 whose ports are used up, to a name with addresses of both families."""


@pytest.mark.parametrize(
    "numbers", [[errno.EMFILE], [errno.ENFILE], [errno.EADDRNOTAVAIL], NO_WAY], ids=["process", "machine", "port", "v6"]
)
async def test_no_socket_to_be_had_is_the_relays_own_fault(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """Taking all sockets of the process would disturb every other test; so the system says that there are none."""
    _failing(monkeypatch, numbers)
    fault = no_response(await outcome(f"http://{LOOPBACK}:9/"), "relay_exhausted", sent=False)
    assert fault.reason.startswith("this relay cannot open another connection: ")
    assert errno.errorcode[numbers[-1]] in fault.reason


async def test_a_destination_that_refuses_at_one_of_its_addresses_is_not_the_relays_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _failing(monkeypatch, [errno.ECONNREFUSED, errno.EADDRNOTAVAIL])
    fault = no_response(await outcome(f"http://{LOOPBACK}:9/"), "connection_refused", sent=False)
    assert fault.reason == "no connection was made: Connection refused; Cannot assign requested address"


def _failing(monkeypatch: pytest.MonkeyPatch, numbers: list[int]) -> None:
    """Let a dial fail as it does when each of several addresses fails with one of ``numbers``."""
    texts = [f"[Errno {number}] Connect call failed ('{LOOPBACK}', 9)" for number in numbers]

    async def fail(*_: object, **__: object) -> socket.socket:
        if len(numbers) == 1:
            raise OSError(numbers[0], texts[0])
        raise OSError("Multiple exceptions: " + ", ".join(texts))

    monkeypatch.setattr(connector, "start_connection", fail)


async def test_a_name_that_cannot_be_looked_up_without_a_descriptor_is_the_relays_own_fault(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's resolver then calls it a failure of the name server."""

    def none_left(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    names.say(NAME, SERVER_FAILED)
    async with posting(f"http://{NAME}:9/") as client:
        with monkeypatch.context() as patched:
            patched.setattr(resolver.socket, "socket", none_left)
            no_response(await post(client), "relay_exhausted", sent=False)


# TLS.


async def test_the_name_is_shown_and_its_certificate_is_accepted(names: Names, authority: Authority) -> None:
    shown: list[str | None] = []
    context = authority.good(NAME)
    context.sni_callback = lambda _socket, name, _context: shown.append(name)
    names.say(NAME, [LOOPBACK])
    with Receiver(tls=context, secrets=()) as receiver:
        found = a_response(await outcome(receiver.url_of(NAME), tls=trusting(authority)))
        assert receiver.requests[0].header("host") == f"{NAME}:{receiver.port}"
    assert shown == [NAME]
    assert [name for name, _ in found.timings] == ["dns", "connect", "tls", "first_byte"]


async def test_a_certificate_of_the_address_is_accepted_for_the_address(authority: Authority) -> None:
    with Receiver(tls=authority.good(), secrets=()) as receiver:
        assert a_response(await outcome(receiver.url, tls=trusting(authority))).status == 200


@pytest.mark.parametrize("kind", ["expired", "wrong_host", "self_signed", "tls_1_0"])
async def test_a_certificate_or_version_that_is_not_good_enough(names: Names, authority: Authority, kind: str) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(tls=getattr(authority, kind)(), secrets=()) as receiver:
        no_response(await outcome(receiver.url_of(NAME), tls=trusting(authority)), "tls_error", sent=False)
        assert receiver.requests == []


async def test_without_a_context_the_systems_authorities_are_trusted(authority: Authority) -> None:
    with Receiver(tls=authority.good(), secrets=()) as receiver:
        fault = no_response(await outcome(receiver.url), "tls_error", sent=False)
        assert "not accepted" in fault.reason


async def test_tls_on_a_plain_port_and_the_reverse(authority: Authority) -> None:
    with Receiver(secrets=()) as plain, Receiver(tls=authority.good(), secrets=()) as secure:
        found = await outcome(plain.url.replace("http:", "https:"), tls=trusting(authority), seconds=QUICK_SECONDS)
        assert isinstance(found, NoResponse)
        assert found.code in {"tls_error", "connect_timeout"}
        assert not found.sent
        found = await outcome(secure.url.replace("https:", "http:"))
        assert isinstance(found, NoResponse)
        assert found.code in {"protocol_error", "disconnected", "connection_reset"}


async def test_the_total_limit_ends_a_handshake_that_stalls(authority: Authority) -> None:
    with Receiver(at_accept=half_handshake(authority.good()), secrets=()) as receiver:
        url = receiver.url.replace("http:", "https:")
        found = await outcome(url, tls=trusting(authority), seconds=QUICK_SECONDS)
        fault = no_response(found, "connect_timeout", sent=False)
    assert "handshake" in fault.reason
    assert fault.seconds < LATE_SECONDS


async def test_a_server_that_wants_a_certificate_has_not_taken_the_request(authority: Authority) -> None:
    with Receiver(tls=authority.asks_for_certificate(), secrets=()) as receiver:
        found = await outcome(receiver.url, tls=trusting(authority))
        assert receiver.requests == []
    assert isinstance(found, NoResponse)
    told = {("tls_error", False), ("connection_reset", True), ("disconnected", True), ("disconnected", False)}
    assert (found.code, found.sent) in told


async def test_bodies_and_resends_work_over_tls(authority: Authority) -> None:
    with Receiver(stale, tls=authority.good(), secrets=()) as receiver:
        async with posting(receiver.url, tls=trusting(authority)) as client:
            for _ in range(3):
                assert a_response(await post(client, body=b"x" * (1 << 20))).status == 200
            receiver.answer = say(500, body=b"y" * 20_000)
            assert a_response(await post(client)).prefix == b"y" * 4096
        assert {len(request.body) for request in receiver.requests[:3]} == {1 << 20}
