"""A session that ends for a new configuration, or gives its shards up, repeats no request that is under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from outbox_relay.relay.sink_spec import SinkSpec
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until

LEASED = "select id from outbox.delivery where lease is not null"
RELEASED = "select 1 where not exists (select from outbox.shard where owner is not null)"


class Slow:
    """A destination that answers the first event when it is released, and every other one at once."""

    def __init__(self, others: Verdict = DELIVERED) -> None:
        self.others = others
        self._released = threading.Event()
        self._first: int | None = None

    def release(self) -> None:
        """Let the first event be answered."""
        self._released.set()

    def __call__(self, event: StoredEvent, _attempt: int) -> Verdict | Awaitable[Verdict]:
        if self._first is None:
            self._first = event.id
        return self._wait() if event.id == self._first else self.others

    async def _wait(self) -> Verdict:
        await asyncio.to_thread(self._released.wait, 60)
        return DELIVERED


def reloaded(harness: RelayHarness, newer: SinkSpec, client: MemorySink) -> None:
    """Do with the harness's sink what SIGHUP does."""
    look = harness.store.tick()
    wanted = [(newer.name, newer.patterns, newer.settings.start)]
    generations = harness.store.register_sinks(wanted, look.tick, server=look.incarnation)
    sink = harness.as_sink(client)
    sink.open()
    harness.served[newer.name].replace(newer, generations[newer.name], sink)


@pytest.mark.fence("a session that ends on purpose repeats a request")
def test_a_reload_waits_for_a_request_that_became_a_row(database: Database) -> None:
    """Goes red when the loop ends once its shards are released, whatever is under way."""
    script = Slow()
    sink, following = MemorySink(script, keeps_order=False), MemorySink(keeps_order=False)
    older = spec("s", patterns=("test.*",), park_after_seconds=0.05)
    newer = replace(older, patterns=("test.*", "other.*"))
    with running(database.dsn, (older, sink)) as harness:
        harness.owns_all()
        [slow] = emit(database, ["a"])
        has(database, LEASED)
        reloaded(harness, newer, following)
        has(database, RELEASED)
        rounds = harness.store.calls["sinks"]
        until(lambda: harness.store.calls["sinks"] >= rounds + 2, seconds=20, what="the relay has looked around")
        assert harness.loops[0].parts.spec == older, "the request is under way"
        script.release()
        until(lambda: harness.loops[0].parts.spec == newer, seconds=30, what="the new settings are in force")
        harness.owns_all()
        [quick] = emit(database, ["b"])
        delivered(following, [quick])
        harness.settled()
    assert (sink.attempts, following.attempts) == ([slow], [quick])
