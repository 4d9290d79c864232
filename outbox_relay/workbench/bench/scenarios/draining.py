"""Drains that several scenarios compare: of the bare loops, and of relays that start on a backlog or wait for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outbox_relay.workbench.bench import relays
from outbox_relay.workbench.bench.database import Database
from outbox_relay.workbench.bench.ends import Receiver, topic_count
from outbox_relay.workbench.bench.figures import Course
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.profile import Profile
from outbox_relay.workbench.demo.parts import Relay

SINK = "events"
END_SECONDS = 60.0


def bare_loop(place: Place, base: Database, events: int, profile: Profile | None = None) -> float:
    """Events per second of the bare loop, to a topic of its own."""
    topic = place.topic()
    count = topic_count(place, topic)
    part = place.start(
        "bare-loop", "outbox_relay.workbench.bench.bare_loop", "--bootstrap", place.bootstrap, "--topic", topic,
        dsn=base.dsn,
    )  # fmt: skip
    course = place.course(profile.watching(count, part.process.pid, events) if profile else count, events)
    place.let_end(part, END_SECONDS)
    return course.per_second


def bare_posts(place: Place, base: Database, receiver: Receiver, events: int) -> float:
    """Events per second of bare posts to `receiver`, which nobody else posts to now."""
    before = receiver.count() + receiver.refused()
    part = place.start(
        "bare-posts", "outbox_relay.workbench.bench.bare_posts", "--url", receiver.url,
        "--at-once", str(relays.AT_ONCE), dsn=base.dsn,
    )  # fmt: skip
    course = place.course(lambda: receiver.count() + receiver.refused() - before, events)
    place.let_end(part, END_SECONDS)
    return course.per_second


def drain(place: Place, config: str, count: Callable[[], int], events: int) -> Course:
    """How the backlog arrives that a relay finds when it starts; it is stopped afterwards."""
    relay = place.relay(config)
    course = place.course(count, events)
    place.end(relay)
    return course


def to_kafka(place: Place, base: Database) -> tuple[str, Callable[[], int]]:
    """The file of a relay to a new topic, and what counts the records in it."""
    topic = place.topic()
    config = relays.config(base.dsn, [SINK], relays.kafka(SINK, topic, place.bootstrap))
    return config, topic_count(place, topic)


def started(place: Place, config: str, number: int) -> Sequence[Relay]:
    """So many relays, which own all shards together."""
    found = [place.relay(config) for _ in range(number)]
    place.ready(*found)
    return found


def waiting(place: Place, number: int, events: int) -> float:
    """Events per second of relays that wait while a whole backlog is committed at once, on a database of its own."""
    base = place.database()
    config, count = to_kafka(place, base)
    running = started(place, config, number)
    base.fill(events, place.check)
    course = place.course(count, events)
    for relay in running:
        place.end(relay)
    return course.per_second
