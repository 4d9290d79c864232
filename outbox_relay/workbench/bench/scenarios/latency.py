"""How long an event takes at a steady rate."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from outbox_relay.workbench.bench import machine, relays
from outbox_relay.workbench.bench.database import TYPE, Database
from outbox_relay.workbench.bench.ends import TopicConsumer
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, MILLISECONDS, PERCENT, Figure, percentile, ratio
from outbox_relay.workbench.bench.place import ASK_EVERY_SECONDS, READY_SECONDS, Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario
from outbox_relay.workbench.demo.parts import Part

QUICK_SECONDS, FULL_SECONDS = 2.0, 20.0
QUICK_RATES, FULL_RATES = (1_000,), (100, 1_000, 5_000)
CLIENTS = 8
WARM_SHARE = 0.1
"""The first events are left out: connections are made and code is warmed up for them."""
SPARE_SECONDS = 60.0
QUIET_SECONDS = 1.0
"""After this time nothing more comes from the bare loop."""
SCRIPT = f"""\\set k random(1, 5000)
select outbox.emit('{TYPE}', jsonb_build_object('at', extract(epoch from clock_timestamp()), 'note', '{"x" * 200}'),
                   key => 'k' || :k::int);
"""
FIRST = f"select outbox.emit('{TYPE}', jsonb_build_object('at', %s::float8, 'note', ''), key => 'k1')"
"""Before the others: what is done once, as asking the broker for the topic's settings, is no event's latency."""
BARE_IS_READY = "select to_regclass('bare_progress') is not null"
_DONE = re.compile(r"^number of transactions actually processed: (\d+)", re.MULTILINE)
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def measure(place: Place) -> Sequence[Figure]:
    """At each rate the bare loop and a relay, each on a database of its own."""
    found: list[Figure] = []
    for rate in FULL_RATES if place.options.full else QUICK_RATES:
        bare, _, _ = _followed(place, rate, _bare_loop)
        own, reached, cpu = _followed(place, rate, _relay)
        at = f"{rate:,}/s"
        found += [
            Figure(f"{at}: bare loop, p50", percentile(bare, 0.5) * 1e3, MILLISECONDS),
            Figure(f"{at}: bare loop, p99", percentile(bare, 0.99) * 1e3, MILLISECONDS),
            Figure(f"{at}: relay, p50", percentile(own, 0.5) * 1e3, MILLISECONDS),
            Figure(f"{at}: relay, p99", percentile(own, 0.99) * 1e3, MILLISECONDS),
            ratio(f"{at}: relay / bare loop, p50", percentile(own, 0.5), percentile(bare, 0.5)),
            Figure(f"{at}: relay, processor", cpu, PERCENT),
            Figure(f"{at}: emitted", reached, EVENTS_PER_SECOND),
        ]
    return found


def _followed(
    place: Place, rate: int, follow: Callable[[Place, Database, str], Part]
) -> tuple[list[float], float, float]:
    """Seconds that events took, events that were really emitted per second, percent of a core that relaying took."""
    base, topic = place.database(), place.topic()
    consumer = TopicConsumer(place, topic)
    part = follow(place, base, topic)
    base.run(FIRST, time.time())
    place.wait(consumer.count, READY_SECONDS, "the first event arrives")
    seconds = max(1, round(place.seconds(QUICK_SECONDS, FULL_SECONDS)))
    spent = machine.cpu_seconds(part.process.pid)
    printed = _emit(place, base, rate, seconds)
    done, tps = _DONE.search(printed), _TPS.search(printed)
    events = int(done[1]) + 1 if done else 0
    _arrive(place, consumer, events, all_of_them=follow is _relay)
    cpu = (machine.cpu_seconds(part.process.pid) - spent) / seconds * 100
    place.end(part)
    times = consumer.times()
    return times[int(len(times) * WARM_SHARE) :], float(tps[1]) if tps else 0.0, cpu


def _arrive(place: Place, consumer: TopicConsumer, events: int, *, all_of_them: bool) -> None:
    """Wait until they have arrived; the bare loop may have lost some: then until nothing has come for a while."""
    last, since = -1, 0.0

    def done() -> bool:
        nonlocal last, since
        count = consumer.count()
        if count != last:
            last, since = count, time.monotonic()
        return count >= events or (not all_of_them and time.monotonic() - since > QUIET_SECONDS)

    place.wait(done, SPARE_SECONDS, f"{events} events arrive")


def _emit(place: Place, base: Database, rate: int, seconds: int) -> str:
    file = place.file(".sql")
    file.write_text(SCRIPT)
    return place.pgbench(
        base, "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={CLIENTS}", "--jobs=1",
        f"--rate={rate}", f"--time={seconds}", seconds=seconds + SPARE_SECONDS,
    )  # fmt: skip


def _bare_loop(place: Place, base: Database, topic: str) -> Part:
    where = ("--bootstrap", place.bootstrap, "--topic", topic, "--follow")
    part = place.start("bare-loop", "outbox_relay.workbench.bench.bare_loop", *where, dsn=base.dsn)
    place.wait(lambda: base.value(BARE_IS_READY), READY_SECONDS, "the bare loop is ready", every=ASK_EVERY_SECONDS)
    return part


def _relay(place: Place, base: Database, topic: str) -> Part:
    config = relays.config(base.dsn, [draining.SINK], relays.kafka(draining.SINK, topic, place.bootstrap))
    return draining.started(place, config, 1)[0]


SCENARIO = Scenario(
    "latency",
    "From before the insert to the consumer of the topic, by one machine's clock, while pgbench emits one event per "
    "transaction at a steady rate (exponential gaps, 8 connections); the first tenth of the events is left out. Beside "
    "a bare loop that looks every millisecond, lingers not, and loses events that become visible late.",
    measure,
    quick=True,
)
