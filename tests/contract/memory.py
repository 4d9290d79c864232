"""The memory sink under the contract, in both its shapes."""

import asyncio
from collections.abc import Sequence

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable, Verdict
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.contract import Received, SinkHarness
from outbox_relay.sinks.posting import PostingSink
from tests.support.memory_sink import MemorySink, OrderedSink

POISON = b"poison"
ANSWER_SECONDS = 0.02


class MemoryHarness(SinkHarness):
    """A destination in this process, which never answers while it is down."""

    def __init__(self, *, keeps_order: bool) -> None:
        self._keeps_order = keeps_order
        self._up = True
        self._clients: list[MemorySink] = []

    def make_sink(self) -> PostingSink:
        client = MemorySink(self._answer, keeps_order=self._keeps_order, max_in_flight=2 if self._keeps_order else 8)
        self._clients.append(client)
        return (OrderedSink if self._keeps_order else PostingSink)(client)

    async def _answer(self, event: StoredEvent, _attempt: int) -> Verdict:
        if not self._up:
            await asyncio.sleep(ANSWER_SECONDS)
            return Unavailable("down")
        return Refused("poison") if event.payload == POISON else DELIVERED

    def received(self) -> Sequence[Received]:
        return [
            Received(
                event.key,
                event.uid,
                event.payload,
                event.type,
                event.content_type,
                dict(own_headers(event.headers) if event.headers else ()),
            )
            for client in self._clients
            for event in client.delivered
        ]

    def break_destination(self) -> None:
        self._up = False

    def mend_destination(self) -> None:
        self._up = True

    def poison(self, event: StoredEvent) -> StoredEvent:
        return event._replace(payload=POISON)
