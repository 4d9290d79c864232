"""Keys that fail, and what the others lose by it."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench import relays
from outbox_relay.workbench.bench.ends import Receiver
from outbox_relay.workbench.bench.figures import COUNT, EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 10_000, 60_000
KEYS = 1_000
HEALTHY = "select count(*) from outbox.event where key not like '%0'"


def measure(place: Place) -> Sequence[Figure]:
    """As many healthy events with and without failing keys among them, and bare posts of the same rows."""
    events = place.events(QUICK, FULL)
    healthy, own, bare, refused = _with_failing(place, events)
    alone = _alone(place, healthy)
    return [
        Figure("bare posts, of all events", bare, EVENTS_PER_SECOND),
        Figure("relay, no key fails", alone, EVENTS_PER_SECOND),
        Figure("relay, one key in ten fails: events of the others", own, EVENTS_PER_SECOND),
        Figure("requests that were refused meanwhile", refused, COUNT),
        ratio("with failing keys / without", own, alone),
        ratio("with failing keys / bare posts", own, bare),
    ]


def _with_failing(place: Place, events: int) -> tuple[int, float, float, int]:
    base = place.database()
    base.fill(events, place.check, keys=KEYS)
    base.settle()
    healthy = int(base.value(HEALTHY))
    bare = draining.bare_posts(place, base, Receiver(place, failing=True), events)
    receiver = Receiver(place, failing=True)
    config = relays.config(base.dsn, [draining.SINK], relays.webhook(draining.SINK, receiver.url))
    own = draining.drain(place, config, receiver.count, healthy).per_second
    return healthy, own, bare, receiver.refused()


def _alone(place: Place, events: int) -> float:
    base = place.database()
    base.fill(events, place.check, keys=KEYS)
    base.settle()
    receiver = Receiver(place)
    config = relays.config(base.dsn, [draining.SINK], relays.webhook(draining.SINK, receiver.url))
    return draining.drain(place, config, receiver.count, events).per_second


SCENARIO = Scenario(
    "failing",
    "A backlog drained to a webhook that answers 500 to every event of one key in ten, for ever, so that these keys' "
    "events are held back and tried again; counted are the events of the other keys, beside a drain of as many events "
    "none of which fails.",
    measure,
)
