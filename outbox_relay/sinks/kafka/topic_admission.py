"""A limit on the number of topics that one sink creates. Events name their topics, so there could be any number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


class TopicAdmission:
    """The topics that a sink may request from the brokers, and thereby create.

    The first ``max_topics`` topics are admitted. Afterwards a topic is admitted only if it exists, so topics created
    by others remain reachable. Topics in ``named`` are always admitted and do not count. The count restarts when the
    sink is opened.
    """

    def __init__(self, max_topics: int, named: Collection[str] = ()) -> None:
        self._max_topics = max_topics
        self._named = frozenset(named)
        self._admitted: set[str] = set()

    def __len__(self) -> int:
        """Return the number of admitted topics, without the named ones."""
        return len(self._admitted)

    def refused(self, topics: Sequence[str], existing: Callable[[], Collection[str]]) -> dict[str, str]:
        """Return the refused ones of ``topics`` with the reasons, and admit the others.

        ``existing`` returns the names of the cluster's topics. It is called at most once, and only at the limit.
        """
        left = self._max_topics - len(self._admitted)
        new = [topic for topic in topics if topic not in self._admitted and topic not in self._named]
        self._admitted.update(new[:left])
        if not (beyond := new[left:]):
            return {}
        found = existing()
        return {topic: self._reason(topic) for topic in beyond if topic not in found}

    def _reason(self, topic: str) -> str:
        return (
            f"topic {topic} does not exist, and this sink has {self._max_topics} topics already: "
            "create it, name it in the setting topics, or raise topics_max"
        )
