"""Names that do not resolve, and requests into private networks: refused before a connection is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.webhooks import Webhooks
from outbox_relay.sinks.webhook import addresses, client
from tests.support.names import NO_SUCH_NAME, SERVER_FAILED, Answer, Names
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.certificates import NAME, Authority
from tests.support.receiver.faults import stale
from tests.support.wait import auntil
from tests.support.webhook_sink import LOOPBACK_NETWORKS, a_sink, code, many, outcome, sending, settings, verdict

PUBLIC = "93.184.215.14"
ONLY_ONE = ["127.0.0.1/32"]
"""The one address of this machine that may be addressed where a test plays both sides of the fence."""

INSIDE = {
    "case 14: loopback": "127.0.0.1",
    "case 15: IPv4 mapped into IPv6": "::ffff:127.0.0.1",
    "case 16: metadata of most clouds": "169.254.169.254",
    "case 17: metadata through NAT64": "64:ff9b::a9fe:a9fe",
    "case 20: private of IPv6": "fd12::1",
}
"""Some of each kind; tests/unit/test_webhook_fences.py has all."""


def assert_blocked(found: Verdict, *hidden: str) -> None:
    """Assert that nothing was sent, no attempt counts, and the reason shows no address."""
    assert isinstance(found, Unavailable)
    assert code(found) == "ssrf_blocked"
    assert not any(address in found.reason for address in hidden)
    assert not any(address in (found.attempt.answer or "") for address in hidden if found.attempt)


@pytest.mark.parametrize("address", INSIDE.values(), ids=INSIDE.keys())
async def test_a_name_that_stands_for_an_inner_address_is_not_dialled(names: Names, address: str) -> None:
    names.say(NAME, [address])
    assert_blocked(await outcome(f"http://{NAME}/", allow_networks=[]), address)
    assert names.asked[NAME] == 1


@pytest.mark.parametrize(
    "addresses",
    [[PUBLIC, "10.0.0.1"], ["127.0.0.1", "::1"]],
    ids=["case 18: one public address, one private", "case 19: one listed, one of IPv6 not"],
)
async def test_a_name_with_one_inner_address_among_others_is_not_dialled_at_all(
    names: Names, addresses: list[str]
) -> None:
    with Receiver() as receiver:
        names.say(NAME, addresses)
        assert_blocked(await outcome(receiver.url_of(NAME), allow_networks=ONLY_ONE), *addresses)
        assert receiver.connections == 0


@contextlib.contextmanager
def two_sides() -> Generator[tuple[Receiver, Receiver]]:
    """Yield two receivers on one port: on an address that is listed, and on one that is not."""
    with Receiver(stale) as listed, Receiver(host="127.0.0.2", port=listed.port) as inner:
        yield listed, inner


async def test_case_20_the_address_that_was_judged_is_the_one_that_is_dialled(names: Names) -> None:
    """A name server that answers every question differently gains nothing: one question per connection."""
    with two_sides() as (listed, inner):
        turns = iter(range(1_000))
        names.say(NAME, lambda: ["127.0.0.1" if next(turns) % 2 == 0 else "127.0.0.2"])
        async with sending(listed.url_of(NAME), allow_networks=ONLY_ONE) as sink:
            for _ in range(5):
                found = await verdict(sink)
                assert found == DELIVERED or code(found) == "ssrf_blocked"
        assert inner.connections == 0
        assert listed.connections > 0


async def test_case_21_a_name_with_500_addresses_ends_within_the_limit(names: Names) -> None:
    """The resolver handles chains of names and times to live: only the addresses count here."""
    many = [f"127.0.{n // 250 + 1}.{n % 250 + 1}" for n in range(500)]
    names.say(NAME, [*many[:-1], "10.0.0.1"])
    found = await outcome(f"http://{NAME}:9/", allow_networks=LOOPBACK_NETWORKS)
    assert isinstance(found, Unavailable)
    assert code(found) == "ssrf_blocked"


@pytest.mark.parametrize("status", [302, 308])
async def test_case_22_a_redirect_is_a_failed_attempt_and_is_not_followed(status: int) -> None:
    with Receiver() as target, Receiver(say(status, ("location", target.url + "?token=t0ken"))) as receiver:
        found = await outcome(receiver.url)
        assert isinstance(found, Failed)
        assert (code(found), found.status) == ("redirect", status)
        assert "t0ken" not in found.reason
        assert target.connections == 0


async def test_case_23_proxies_of_the_environment_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver(say(407)) as proxy, Receiver() as receiver:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert await outcome(receiver.url) == DELIVERED
        assert proxy.connections == 0


async def test_case_10_the_certificate_and_the_host_header_are_those_of_the_name_without_its_dot(
    names: Names, authority: Authority
) -> None:
    """The dot is for name servers alone, where it says that nothing is to be added."""
    name = "Receiver.TEST."
    shown: list[str | None] = []
    context = authority.good(NAME)
    context.sni_callback = lambda _socket, told, _context: shown.append(told)
    names.say(NAME, ["127.0.0.1"])
    with Receiver(tls=context) as receiver:
        assert await outcome(receiver.url_of(name), ca_file=authority.certificate_file) == DELIVERED
        assert await a_sink(receiver.url_of(name), ca_file=authority.certificate_file).check() is None
        assert receiver.requests[0].header("host") == f"{NAME}:{receiver.port}"
    assert shown == [NAME] * 2
    assert set(names.asked) == {f"{NAME}."}


async def test_case_24_what_is_the_relays_own_is_not_dialled(names: Names) -> None:
    """Its database, by address and by name, and its own port: refused although the network is listed."""
    names.say(NAME, ["127.0.0.1"])
    with Receiver() as receiver:
        at_home = f"postgresql://relay@127.0.0.1:{receiver.port}/shop"
        for url in (receiver.url, receiver.url_of("localhost")):
            with pytest.raises(ConfigurationError, match="relay's own database"):
                settings(url, dsn=at_home)
        assert_blocked(await outcome(receiver.url_of(NAME), dsn=at_home))
        elsewhere = settings(receiver.url)
        own_addresses = OwnAddresses(elsewhere)
        own_addresses.add("127.0.0.1", receiver.port)
        assert receiver.connections == 0
        assert_blocked(await _through(Webhooks(elsewhere, own_addresses)))
        assert receiver.connections == 0
        assert await outcome(receiver.url, dsn=f"postgresql://relay@127.0.0.1:{receiver.port + 1}/shop") == DELIVERED


async def _through(webhooks: Webhooks) -> Verdict:
    sink = webhooks.make("crm").client
    await sink.open()
    try:
        return await verdict(sink)
    finally:
        await sink.close()


WRONG: dict[str, Answer] = {
    "case 26: no such name": NO_SUCH_NAME,
    "case 27: the name server failed": SERVER_FAILED,
    "case 29: no address at all": [],
    "case 29: a name that cannot be encoded": UnicodeError("label empty or too long"),
    "case 29: an error of the system": OSError(5, "Input/output error"),
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
async def test_a_name_that_does_not_resolve_counts_no_attempt(names: Names, answer: Answer) -> None:
    names.say(NAME, answer)
    found = await outcome(f"http://{NAME}/")
    assert isinstance(found, Unavailable)
    assert code(found) == "dns_error"
    assert found.reason.isprintable()


async def test_case_29_an_answer_that_is_no_address_counts_no_attempt(names: Names) -> None:
    names.say(NAME, ["nonsense"])
    found = await outcome(f"http://{NAME}/")
    assert isinstance(found, Unavailable)
    assert code(found) in {"dns_error", "ssrf_blocked"}


async def test_case_26_a_name_that_failed_is_found_once_it_is_there(names: Names) -> None:
    with Receiver() as receiver:
        names.say(NAME, NO_SUCH_NAME)
        url = receiver.url.replace(receiver.host, NAME)
        assert code(await outcome(url)) == "dns_error"
        names.say(NAME, ["127.0.0.1"])
        assert await outcome(url) == DELIVERED


async def test_case_28_five_dead_names_do_not_delay_a_healthy_one(names: Names) -> None:
    """Each of the five has requests under way that wait in a thread; the healthy one has its own way to resolve."""
    dead = [f"dead{n}.test" for n in range(5)]
    for name in dead:
        names.hang(name)
    names.say(NAME, ["127.0.0.1"])

    async def all_asked() -> bool:
        return all(names.asked[name] for name in dead)

    with Receiver() as receiver:
        async with many([f"http://{name}/" for name in dead]) as sinks:
            under_way = [asyncio.ensure_future(verdict(sink)) for sink in sinks for _ in range(5)]
            await auntil(all_asked, seconds=10, what="all dead names are being asked for")
            assert await outcome(receiver.url.replace(receiver.host, NAME)) == DELIVERED
            assert not any(one.done() for one in under_way)
            names.release()
            found = await asyncio.gather(*under_way)
        assert {code(each) for each in found} <= {"dns_error", "dns_timeout"}


async def test_requests_in_constant_use_follow_a_name_that_moves(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both receivers go on answering: only the age of the connection makes the sink look the name up again."""
    monkeypatch.setattr(client, "AGE_SECONDS", 0.3)
    monkeypatch.setattr(addresses, "KEPT_SECONDS", 0.0)
    names.say(NAME, ["127.0.0.1"])
    with Receiver() as blue, Receiver(host="127.0.0.2", port=blue.port) as green:
        async with sending(blue.url_of(NAME)) as sink:
            assert await verdict(sink) == DELIVERED
            names.say(NAME, ["127.0.0.2"])

            async def moved() -> bool:
                assert await verdict(sink) == DELIVERED
                return bool(green.requests)

            await auntil(moved, seconds=30, what="the new address receives a request")
            of_the_old_one = len(blue.requests)
            for _ in range(10):
                assert await verdict(sink) == DELIVERED
            assert len(blue.requests) == of_the_old_one
