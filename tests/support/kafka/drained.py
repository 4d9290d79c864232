"""Everything in a topic, judged by what was committed."""

from __future__ import annotations

from tests.support.kafka import KafkaBroker
from tests.support.shop import Report, compare
from tests.support.wait import until


def drained(kafka: KafkaBroker, topic: str, committed: dict[str, int], seconds: float) -> Report:
    """Consume the topic until all committed events have arrived; return the comparison, with those that came twice."""
    wanted = sum(committed.values())
    values: list[bytes] = []

    def enough() -> bool:
        values[:] = [record.value or b"" for record in kafka.read_all(topic, seconds=60)]
        return len(set(values)) >= wanted

    until(enough, seconds=seconds, what=f"{wanted} events arrive")
    return compare(committed, values)
