"""How many topics one sink makes: events name them, so their number needs a bound."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class TopicAdmission:
    """The topics that a sink asks the brokers for, and with that may create.

    The first ``most`` topics are admitted as they come. After that an event is refused if its topic does not exist
    yet, so topics that others made remain reachable, but no new one is made. ``named`` are topics that the settings
    name; they are always admitted and do not count. The count begins again when the sink is opened.
    """

    def __init__(self, most: int, named: Collection[str] = ()) -> None:
        self._most = most
        self._named = frozenset(named)
        self._admitted: set[str] = set()

    def __len__(self) -> int:
        """How many topics are admitted, those that the settings name excepted."""
        return len(self._admitted)

    def refused(self, topics: Sequence[str], existing: Callable[[], Collection[str]]) -> dict[str, str]:
        """Return the reason for each of ``topics`` that is one too many; the others are admitted.

        ``existing`` asks the cluster for the names of its topics, at most once and only when the bound is reached.
        """
        left = self._most - len(self._admitted)
        new = [topic for topic in topics if topic not in self._admitted and topic not in self._named]
        self._admitted.update(new[:left])
        if not (beyond := new[left:]):
            return {}
        there = existing()
        return {topic: self._reason(topic) for topic in beyond if topic not in there}

    def _reason(self, topic: str) -> str:
        return (
            f"topic {topic} does not exist, and this sink has {self._most} topics already: "
            "create it, name it in the setting topics, or raise topics_max"
        )
