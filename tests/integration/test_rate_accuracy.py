"""The rate of all relays together over ten seconds of the receiver's clock: within a tenth of what the settings say."""

from __future__ import annotations

import pytest

from outbox_relay.domain.sink_limits import SinkLimits
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.relay_harness import owns, running, spec
from tests.support.wait import auntil
from tests.support.webhook_sink import a_sink

RATE = 50.0
SECONDS = 10.0
PART = 0.1


async def pace(receiver: Receiver) -> float:
    """Return the requests per second between two of them that came ten seconds apart, as a part of the rate."""
    first = len(receiver.requests)

    async def fact() -> bool:
        requests = receiver.requests[first:]
        return bool(requests) and requests[-1].arrived - requests[0].arrived >= SECONDS

    await auntil(fact, seconds=90, what="ten seconds pass at the receiver")
    times = [request.arrived for request in receiver.requests[first:]]
    return (len(times) - 1) / (times[-1] - times[0]) / RATE


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["log", "rows"])
async def test_the_rate_is_kept_with_one_relay_and_with_two(database: Database, claim: str) -> None:
    """Goes red with a rate for each relay, and with shares that leave a part of the rate to no one."""
    query(database, "select outbox.emit('job', '1', key => n::text) from generate_series(1, 4500) n")
    limited = spec("s", limits=SinkLimits(RATE), claim=claim, ordered=claim == "log")
    with Receiver() as receiver:
        async with running(database.dsn, (limited, a_sink(receiver.url)), lease_seconds=3.0, expects={"handed_over"}):
            found = [await pace(receiver)]
            async with running(
                database.dsn, (limited, a_sink(receiver.url)), lease_seconds=3.0, expects={"handed_over"}
            ) as second:
                await owns(second, 32)
                found.append(await pace(receiver))
    assert [each for each in found if not 1 - PART <= each <= 1 + PART] == []
