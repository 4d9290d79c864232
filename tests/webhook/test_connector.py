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
from types import SimpleNamespace

import pytest

from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.sinks.webhook import addresses, connector
from outbox_relay.sinks.webhook.http_client import NoResponse
from tests.support.names import NO_SUCH_NAME, Names
from tests.support.ports import LOOPBACK
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.certificates import NAME, Authority
from tests.support.receiver.faults import close, stale, then
from tests.support.wait import until
from tests.support.webhook_client import (
    QUICK_SECONDS,
    a_response,
    no_response,
    outcome,
    post,
    posting,
    trusting,
)
from tests.support.webhook_sink import outcome as sink_outcome

one_each = then(say(200, ("connection", "close")), close)
"""An answer that ends its connection, and says so: the next request needs a new one."""


# Addresses.


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


@pytest.mark.parametrize(
    ("host", "own"),
    [(LOOPBACK, "0.0.0.0"), (NAME, LOOPBACK), ("[::ffff:127.0.0.1]", "::"), (LOOPBACK, "::ffff:127.0.0.1")],  # noqa: S104
)
async def test_what_is_the_relays_own_is_not_dialled_whatever_is_allowed(names: Names, host: str, own: str) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        url = f"http://{host}:{receiver.port}/"
        no_response(await outcome(url, own=[("10.9.9.9", 5432), (own, receiver.port)]), "ssrf_blocked", sent=False)
        assert a_response(await outcome(url, own=[(own, receiver.port + 1)])).status == 200
        assert receiver.connections == 1


# Names.


async def test_a_failed_lookup_is_not_repeated_at_once(names: Names) -> None:
    async with posting(f"http://{NAME}:9/") as client:
        for _ in range(3):
            no_response(await post(client), "dns_error", sent=False)
        assert names.asked[NAME] == 1


async def test_one_lookup_serves_all_who_wait_for_it(names: Names) -> None:
    names.say(NAME, [LOOPBACK])
    with Receiver(secrets=()) as receiver:
        async with posting(receiver.url_of(NAME)) as client:
            found = await asyncio.gather(*(post(client) for _ in range(20)))
            assert {a_response(each).status for each in found} == {200}
            assert [name for name, _ in a_response(found[0]).timings] == ["dns", "connect", "first_byte"]
        assert names.asked[NAME] == 1


async def test_a_name_server_that_hangs_ends_with_the_limit_and_takes_one_thread(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(addresses, "KEPT_SECONDS", 0.0)
    names.hang(NAME)
    before = threading.active_count()
    async with posting(f"http://{NAME}:9/") as client:
        for _ in range(5):
            no_response(await post(client), "dns_timeout", sent=False)
        assert names.asked[NAME] == 1
        assert threading.active_count() <= before + 1
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
            sent = asyncio.ensure_future(post(client, seconds=QUICK_SECONDS))
            await asyncio.wait({sent}, timeout=2 * QUICK_SECONDS)
            assert not sent.done()
            answers.set()
            assert a_response(await sent).status == 200


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
from outbox_relay.sinks.webhook import Endpoint, addresses
from outbox_relay.sinks.webhook.client import PooledClient
from outbox_relay.sinks.webhook.connector import Connector

async def main():
    url = "http://hangs.test/"
    print((await PooledClient(url, Connector(Endpoint(url, lambda _: None))).post([], b"", 0.1)).code)

addresses.LOOKUP_SECONDS = 0.1

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
    monkeypatch.setattr(addresses, "LOOKUP_SECONDS", 0.1)
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


async def test_an_address_that_does_not_answer_does_not_stop_the_next_one(names: Names) -> None:
    names.say(NAME, ["127.0.0.9", "::1", LOOPBACK])
    with Receiver(secrets=()) as receiver:
        assert a_response(await outcome(receiver.url_of(NAME))).status == 200


async def test_only_so_many_addresses_of_a_name_are_tried(names: Names) -> None:
    names.say(NAME, [*(f"127.0.1.{n + 1}" for n in range(connector.DIALLED)), LOOPBACK])
    with Receiver(secrets=()) as receiver:
        no_response(await outcome(receiver.url_of(NAME)), "connection_refused", sent=False)
        assert receiver.connections == 0


@pytest.mark.parametrize("numbers", [[errno.EADDRNOTAVAIL], [errno.EMFILE, errno.EADDRNOTAVAIL]])
async def test_a_machine_without_ports_or_files_is_the_relays_trouble(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int]
) -> None:
    _failing(monkeypatch, numbers)
    url = f"http://{LOOPBACK}:9/"
    fault = no_response(await outcome(url), "internal", sent=False)
    assert fault.reason == f"this machine can make no connection: {'; '.join(map(os.strerror, numbers))}"
    found = await sink_outcome(url)
    assert isinstance(found, Unavailable)
    assert found.behind, "the circuit does not count it"


async def test_a_machine_without_files_cannot_look_names_up(monkeypatch: pytest.MonkeyPatch, names: Names) -> None:
    """The resolver of the system calls that a failure of the name."""

    def none_left(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    names.say(NAME, NO_SUCH_NAME)
    monkeypatch.setattr(addresses, "socket", SimpleNamespace(**{**vars(socket), "socket": none_left}))
    no_response(await outcome(f"http://{NAME}:9/"), "internal", sent=False)


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


async def test_bodies_and_resends_work_over_tls(authority: Authority) -> None:
    with Receiver(stale, tls=authority.good(), secrets=()) as receiver:
        async with posting(receiver.url, tls=trusting(authority)) as client:
            for _ in range(3):
                assert a_response(await post(client, body=b"x" * (1 << 20))).status == 200
            receiver.answer = say(500, body=b"y" * 20_000)
            assert a_response(await post(client)).prefix == b"y" * 4096
        assert {len(request.body) for request in receiver.requests[:3]} == {1 << 20}
