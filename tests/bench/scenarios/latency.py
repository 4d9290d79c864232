"""Latency at a steady rate."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from outbox_relay.workbench.processes import PythonProcess
from tests.bench import machine, relay_config
from tests.bench.database import TYPE, BenchDatabase
from tests.bench.destinations import ConsumerProcess
from tests.bench.environment import QUERY_SECONDS, READY_SECONDS, BenchEnvironment
from tests.bench.figures import EVENTS_PER_SECOND, MILLISECONDS, PERCENT, Figure, percentile, ratio
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK_SECONDS, FULL_SECONDS = 2.0, 20.0
QUICK_RATES, FULL_RATES = (1_000,), (100, 1_000, 5_000)
CLIENTS = 8
WARM_SHARE = 0.1
"""Share of first events that are not counted, because they include connecting and warm-up."""
SPARE_SECONDS = 60.0
QUIET_SECONDS = 1.0
"""The bare loop has finished after this time without an arrival."""
SCRIPT = f"""\\set k random(1, 5000)
select outbox.emit('{TYPE}', jsonb_build_object('at', extract(epoch from clock_timestamp()), 'note', '{"x" * 200}'),
                   key => 'k' || :k::int);
"""
FIRST = f"select outbox.emit('{TYPE}', jsonb_build_object('at', %s::float8, 'note', ''), key => 'k1')"
"""Emitted before the others, so that one-time work such as asking the broker for topic settings is not measured."""
BARE_IS_READY = "select to_regclass('bare_progress') is not null"
_DONE = re.compile(r"^number of transactions actually processed: (\d+)", re.MULTILINE)
_TPS = re.compile(r"^tps = ([\d.]+)", re.MULTILINE)


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the bare loop and a relay at each rate, each with a new database."""
    found: list[Figure] = []
    for rate in FULL_RATES if bench.options.full else QUICK_RATES:
        bare, _, bare_cpu = _followed(bench, rate, bare_loop)
        own, reached, cpu = _followed(bench, rate, relay)
        at = f"{rate:,}/s"
        found += [
            *compared(at, own, bare),
            Figure(f"{at}: bare loop, processor", bare_cpu, PERCENT),
            Figure(f"{at}: relay, processor", cpu, PERCENT),
            ratio(f"{at}: relay / bare loop, processor", cpu, bare_cpu),
            Figure(f"{at}: emitted", reached, EVENTS_PER_SECOND),
        ]
    return found


def compared(what: str, own: Sequence[float], bare: Sequence[float]) -> list[Figure]:
    """Return the percentiles of latencies in seconds, of a relay and of the bare loop, and their ratios."""
    return [
        *(
            Figure(f"{what}: {name}, p{share:.0%}"[:-1], percentile(times, share) * 1e3, MILLISECONDS)
            for name, times in (("bare loop", bare), ("relay", own))
            for share in (0.5, 0.99)
        ),
        *(
            ratio(f"{what}: relay / bare loop, p{share:.0%}"[:-1], percentile(own, share), percentile(bare, share))
            for share in (0.5, 0.99)
        ),
    ]


def _followed(
    bench: BenchEnvironment, rate: int, follow: Callable[[BenchEnvironment, BenchDatabase, str], PythonProcess]
) -> tuple[list[float], float, float]:
    """Return the latencies in seconds, the reached emit rate, and the processor usage as a percentage of a core."""
    database, topic = bench.new_database(), bench.new_topic()
    consumer = ConsumerProcess(bench, topic)
    process = follow(bench, database, topic)
    database.run(FIRST, time.time())
    bench.wait_until(consumer.count, READY_SECONDS, "the first event arrives")
    seconds = max(1, round(bench.scaled_seconds(QUICK_SECONDS, FULL_SECONDS)))
    spent = machine.cpu_seconds(process.pid)
    printed = emit(bench, database, SCRIPT, rate, seconds)
    done, tps = _DONE.search(printed), _TPS.search(printed)
    events = int(done[1]) + 1 if done else 0
    arrive(bench, consumer, events, all_of_them=follow is relay)
    cpu = (machine.cpu_seconds(process.pid) - spent) / seconds * 100
    bench.stop(process)
    times = consumer.stop()
    return times[int(len(times) * WARM_SHARE) :], float(tps[1]) if tps else 0.0, cpu


def arrive(bench: BenchEnvironment, consumer: ConsumerProcess, events: int, *, all_of_them: bool) -> None:
    """Wait until all events have arrived; without `all_of_them`, also stop when none has arrived for a while."""
    last, since = -1, 0.0

    def done() -> bool:
        nonlocal last, since
        count = consumer.count()
        if count != last:
            last, since = count, time.monotonic()
        return count >= events or (not all_of_them and time.monotonic() - since > QUIET_SECONDS)

    bench.wait_until(done, SPARE_SECONDS, f"{events} events arrive")


def emit(bench: BenchEnvironment, database: BenchDatabase, script: str, rate: int, seconds: int) -> str:
    """Run ``script`` at a steady rate, and return what pgbench printed."""
    file = bench.new_path(".sql")
    file.write_text(script)
    return bench.pgbench(
        database, "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={CLIENTS}", "--jobs=1",
        f"--rate={rate}", f"--time={seconds}", seconds=seconds + SPARE_SECONDS,
    )  # fmt: skip


def bare_loop(bench: BenchEnvironment, database: BenchDatabase, topic: str) -> PythonProcess:
    """Start the bare loop, which follows the log."""
    where = ("--bootstrap", bench.bootstrap, "--topic", topic, "--follow")
    process = bench.start_process("bare-loop", "tests.bench.bare_loop", *where, dsn=database.dsn)
    bench.wait_until(lambda: database.value(BARE_IS_READY), READY_SECONDS, "the bare loop is up", every=QUERY_SECONDS)
    return process


def relay(bench: BenchEnvironment, database: BenchDatabase, topic: str) -> PythonProcess:
    """Start a relay with one sink."""
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.kafka(steps.SINK, topic, bench.bootstrap))
    return steps.start_relays(bench, config, 1)[0]


SCENARIO = Scenario(
    "latency",
    "Latency from before the insert to the consumer of the topic, by one machine's clock, while pgbench emits one "
    "event per transaction at a steady rate (exponential gaps, 8 connections), without the first tenth of the events. "
    "Compared with a bare loop that polls every millisecond, does not linger, and loses events that become visible "
    "late.",
    measure,
    quick=True,
)
