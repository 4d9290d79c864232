"""A Kafka sink that records its verdicts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Delivered, Verdict
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.wait import auntil

SECONDS = 60


class RecordingKafkaSink(KafkaSink):
    """Counts the verdicts, and keeps the reasons of undelivered events."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.verdicts: Counter[type[Verdict]] = Counter()
        self.reasons: set[str] = set()

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        verdicts = await super().deliver(batch, until, attempt)
        self.verdicts.update(map(type, verdicts))
        self.reasons.update(verdict.reason for verdict in verdicts if not isinstance(verdict, Delivered))
        return verdicts

    async def has(self, verdict: type[Verdict], count: int = 1) -> None:
        """Wait until `count` events have this verdict."""

        async def fact() -> bool:
            return self.verdicts[verdict] >= count

        await auntil(fact, seconds=SECONDS, what=f"{count} events are {verdict.__name__}")
