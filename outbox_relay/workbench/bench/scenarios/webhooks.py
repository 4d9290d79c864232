"""Drain of a backlog to webhooks."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench import relays
from outbox_relay.workbench.bench.ends import Receiver
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 4_000, 60_000


def measure(place: Place) -> Sequence[Figure]:
    """Bare posts, then a relay that starts on the same backlog."""
    events = place.events(QUICK, FULL)
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    bare = draining.bare_posts(place, base, Receiver(place), events)
    receiver = Receiver(place)
    config = relays.config(base.dsn, [draining.SINK], relays.webhook(draining.SINK, receiver.url))
    own = draining.drain(place, config, receiver.count, events).per_second
    return [
        Figure("bare posts", bare, EVENTS_PER_SECOND),
        Figure("relay", own, EVENTS_PER_SECOND),
        ratio("relay / bare posts", own, bare),
    ]


SCENARIO = Scenario(
    "webhooks",
    "A backlog drained to one webhook, 64 requests under way, signed, in order per key; the receiver is a process of "
    "its own that answers at once. Beside a loop that reads the same rows and posts them with aiohttp as it is.",
    measure,
    quick=True,
)
