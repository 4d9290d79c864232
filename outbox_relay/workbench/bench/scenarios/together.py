"""Several relays on one sink, beside one."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 200_000, 1_000_000
RELAYS = 4


def measure(place: Place) -> Sequence[Figure]:
    """One relay, several, and the bare loop; each drains a backlog of its own of the same size."""
    events = place.events(QUICK, FULL)
    one = draining.waiting(place, 1, events)
    several = draining.waiting(place, RELAYS, events)
    base = place.database()
    base.fill(events, place.check)
    bare = draining.bare_loop(place, base, events)
    return [
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("1 relay", one, EVENTS_PER_SECOND),
        Figure(f"{RELAYS} relays", several, EVENTS_PER_SECOND),
        ratio(f"{RELAYS} relays / 1 relay", several, one),
        ratio(f"{RELAYS} relays / bare loop", several, bare),
    ]


SCENARIO = Scenario(
    "together",
    f"{RELAYS} relay processes that share the shards of one sink, and one alone: they are ready and wait when the "
    "whole backlog is committed at once. Counted in the topic, from the first record to the last.",
    measure,
)
