"""The first records of a producer: what may go out before the one ahead of it in its key is acknowledged.

A request that fails for good leaves a gap in the numbers of its partition, and a broker refuses what comes behind a
gap. But it knows of none while it has taken nothing of the producer in that partition: it then takes what comes behind
a refused request, and what that held beside the refused record, sent again, would come later than that. So on a new
producer nothing goes out behind a record of its key until one of that key, or one in every partition of the topic, has
been acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from outbox_relay.sinks.kafka.call import DeliverCall

KEYS = 100_000
"""Keys remembered at once, at most: then each waits once more."""

Kept = tuple[str, str]
"""A topic and a key."""


class NewProducerGuard:
    """What one producer has been given, and what of it was acknowledged, as far as it is new."""

    def __init__(self) -> None:
        self.partitions: set[tuple[str, int]] = set()
        """Topic and number of those partitions in which a record was acknowledged."""
        self._sent: set[Kept] = set()
        self._taken: set[Kept] = set()
        self._known: set[str | None] = {None}

    def over(self, call: DeliverCall, places: Sequence[int]) -> bool:
        """Whether a record was acknowledged in every partition of the topics of ``places``."""
        return self._known.issuperset(map(call.topics.__getitem__, places))

    def fitting(self, call: DeliverCall, places: Sequence[int]) -> Sequence[int]:
        """The first of ``places``, up to one that must wait for an acknowledgement."""
        given = set(self._sent)

        def free(place: int) -> bool:
            at = self._waits(call, place)
            return at is None or (at not in given and not given.add(at))

        return list(takewhile(free, places))

    def sent(self, call: DeliverCall, places: Sequence[int]) -> None:
        """``places`` were handed over."""
        self._sent.update(at for place in places if (at := self._waits(call, place)) is not None)

    def acknowledged(self, partitions: Callable[[str], int]) -> None:
        """Everything handed over was acknowledged; ``partitions`` says how many a topic has."""
        topics = {topic for topic, _ in self._sent}
        self._taken |= self._sent
        self._sent.clear()
        for topic in topics:
            if sum(of == topic for of, _ in self.partitions) >= partitions(topic):
                self._known.add(topic)
        if topics <= self._known or len(self._taken) > KEYS:
            self._taken.clear()

    def _waits(self, call: DeliverCall, place: int) -> Kept | None:
        """Topic and key of the event at ``place``, unless it may follow another of its key."""
        topic, key = call.topics[place], call.batch[place].key
        if topic is None or key is None or topic in self._known or (topic, key) in self._taken:
            return None
        return topic, key
