"""Names that do not resolve: no attempt counts, and one dead name delays no other sink."""

from __future__ import annotations

import asyncio

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.sinks.webhook import addresses, client
from tests.support.names import NO_SUCH_NAME, SERVER_FAILED, Answer, Names
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import NAME
from tests.support.wait import auntil
from tests.support.webhook_sink import code, many, outcome, sending, verdict

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
