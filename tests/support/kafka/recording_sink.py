"""A Kafka sink that records its verdicts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from outbox_relay.domain.outcomes import Delivered, Verdict
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.wait import until

SECONDS = 60


class RecordingKafkaSink(KafkaSink):
    """Counts the verdicts, and keeps the reasons of undelivered events."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.verdicts: Counter[type[Verdict]] = Counter()
        self.reasons: set[str] = set()

    def completed(self, seconds: float) -> Sequence[Call]:
        """Take the calls that have ended."""
        ended = super().completed(seconds)
        for call in ended:
            if call.verdicts is None:
                self.verdicts[Delivered] += len(call.events)
                continue
            self.verdicts.update(map(type, call.verdicts))
            self.reasons.update(verdict.reason for verdict in call.verdicts if not isinstance(verdict, Delivered))
        return ended

    def has(self, verdict: type[Verdict], count: int = 1) -> None:
        """Wait until `count` events have this verdict."""
        until(lambda: self.verdicts[verdict] >= count, seconds=SECONDS, what=f"{count} events are {verdict.__name__}")
