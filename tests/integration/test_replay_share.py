"""A replay and its sink share a destination: the requests that a replay takes, and whose circuit its failures open."""

from __future__ import annotations

import asyncio

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replays import Clients, ended, start
from tests.support.wait import until

SLOTS = 16
KEYS = [f"k{n}" for n in range(60)]
DOWN = Unavailable("connection refused")
PASSED = "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0"
SERVED = "select from outbox.shard where sink = '~1' and owner is not null having count(*) = 64"
STATE = "select circuit, last_error from outbox.sink"


class Destination:
    """Counts the requests of replays that are under way, and says whether it is down for the sink or for replays."""

    def __init__(self) -> None:
        self.under_way = self.most = self.asked = 0
        self.down_for_sink = self.down_for_replays = False

    async def replay(self, _event: StoredEvent, _attempt: int) -> Verdict:
        """Answer a request of a replay."""
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        return DOWN if self.down_for_replays else DELIVERED

    def live(self, _event: StoredEvent, _attempt: int) -> Verdict:
        """Answer a request of the sink."""
        return DOWN if self.down_for_sink else DELIVERED

    def sink(self) -> MemorySink:
        """Return the client of the sink."""
        return MemorySink(self.live, keeps_order=False, max_in_flight=SLOTS)

    def clients(self) -> Clients:
        """Return a maker of clients for replays."""
        return Clients(lambda: self.replay, keeps_order=False)


@pytest.mark.slow
def test_failures_of_a_replay_do_not_open_the_circuit_of_its_sink(database: Database) -> None:
    """Goes red when a replay reports its circuit under the name of the sink, or shares its breaker."""
    destination = Destination()
    destination.down_for_replays = True
    sink, clients = destination.sink(), destination.clients()
    with running(database.dsn, (spec("s"), sink), replay_client=clients) as harness:
        delivered(sink, emit(database, KEYS))
        has(database, PASSED)
        number = start(database, since="PT1H")
        replays = harness.replays
        assert replays is not None

        def opened() -> bool:
            return any(served.loop.circuit != "closed" for served in replays.sinks.values())

        until(opened, seconds=20, what="the circuit of the replay is open")
        before = destination.asked

        def probed() -> bool:
            return destination.asked >= before + 10

        until(probed, seconds=20, what="the replay probes, long after its first report")
        assert query(database, STATE) == [("closed", None)]
        delivered(sink, emit(database, KEYS[:20]))
        destination.down_for_replays = False
        ended(database, number)
    assert len(set(clients.ids(number))) == len(KEYS)


@pytest.mark.slow
def test_an_open_circuit_of_the_sink_pauses_its_replay(database: Database) -> None:
    """Goes red when a replay sends whatever the circuit of its target is."""
    destination = Destination()
    sink, clients = destination.sink(), destination.clients()
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        wanted = emit(database, KEYS)
        delivered(sink, wanted)
        has(database, PASSED)
        destination.down_for_sink = True
        late = emit(database, KEYS)
        has(database, f"{STATE} where circuit <> 'closed'")
        number = start(database, since="PT1H")
        has(database, SERVED)
        probes = len(sink.attempts)

        def probed() -> bool:
            return len(sink.attempts) >= probes + 3

        until(probed, seconds=20, what="the destination is probed by the sink")
        assert destination.asked == 0
        destination.down_for_sink = False
        delivered(sink, late)
        ended(database, number)
    assert set(clients.ids(number)) >= set(wanted)
