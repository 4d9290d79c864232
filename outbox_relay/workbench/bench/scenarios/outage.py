"""A destination that was down, and the catch-up."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outbox_relay.workbench.bench import relays
from outbox_relay.workbench.bench.database import Database
from outbox_relay.workbench.bench.ends import Receiver
from outbox_relay.workbench.bench.figures import COUNT, EVENTS_PER_SECOND, SECONDS, Course, Figure, ratio
from outbox_relay.workbench.bench.place import ASK_EVERY_SECONDS, Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 10_000, 60_000
"""Ten minutes of 100 events a second, in full."""
QUICK_DOWN_SECONDS, FULL_DOWN_SECONDS = 3.0, 60.0
BEFORE = 100
OPEN_SECONDS = 60.0
CIRCUIT = "select circuit from outbox.sink where name = %s"
ROWS = "select count(*) from outbox.delivery"


def measure(place: Place) -> Sequence[Figure]:
    """The receiver goes away, a backlog is committed, the receiver comes back; beside it, drains of such a backlog."""
    events = place.events(QUICK, FULL)
    base = place.database()
    receiver = Receiver(place)
    config = relays.config(base.dsn, [draining.SINK], relays.webhook(draining.SINK, receiver.url))
    draining.started(place, config, 1)
    base.fill(BEFORE, place.check)
    place.course(receiver.count, BEFORE)
    receiver.close()
    base.fill(events, place.check)
    _be_down(place, base)
    rows = int(base.value(ROWS))
    returned = time.monotonic()
    course = place.course(Receiver(place, port=receiver.port).count, events)
    bare, fresh = _beside(place, events)
    return [
        Figure("rows of delivery at the end of the outage", rows, COUNT),
        Figure("first delivery after the return", course.at(1) - returned, SECONDS),
        Figure("bare posts", bare, EVENTS_PER_SECOND),
        Figure("relay that starts on the same backlog", fresh.per_second, EVENTS_PER_SECOND),
        Figure("catch-up", course.per_second, EVENTS_PER_SECOND),
        ratio("catch-up / drain", course.per_second, fresh.per_second),
        ratio("catch-up / bare posts", course.per_second, bare),
    ]


def _be_down(place: Place, base: Database) -> None:
    place.wait(
        lambda: base.value(CIRCUIT, draining.SINK) == "open",
        OPEN_SECONDS,
        "the circuit opens while nobody listens",
        every=ASK_EVERY_SECONDS,
    )
    place.pause(place.seconds(QUICK_DOWN_SECONDS, FULL_DOWN_SECONDS))


def _beside(place: Place, events: int) -> tuple[float, Course]:
    """The bare posts, and a relay that starts on a backlog of this size."""
    base = place.database()
    base.fill(events, place.check)
    bare = draining.bare_posts(place, base, Receiver(place), events)
    receiver = Receiver(place)
    config = relays.config(base.dsn, [draining.SINK], relays.webhook(draining.SINK, receiver.url))
    return bare, draining.drain(place, config, receiver.count, events)


SCENARIO = Scenario(
    "outage",
    "A webhook that nobody answers at while a backlog is committed (in full 60,000 events, ten minutes of 100 a "
    "second, and a minute of waiting), and the catch-up when it is back: until the first delivery, and from then on.",
    measure,
)
