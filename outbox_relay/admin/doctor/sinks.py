"""The checks of sinks, replays and relays, from the result of ``status``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outbox_relay.admin.doctor.finding import Finding
from outbox_relay.admin.render import limits_text
from outbox_relay.admin.text import duration

OLDEST_SECONDS = 300.0
"""Age of the oldest unsettled event from which a sink counts as behind."""
VERY_OLD_SECONDS = 3600.0
"""Age from which that is critical."""
CIRCUIT_SECONDS = 300.0
"""Time without a closed circuit from which a destination that is down is critical."""
UNOWNED_SECONDS = 30.0
"""Time without an owner from which a shard is reported: two default leases. Less is normal after a relay stopped."""
SHARDS = 64
"""Number of shards of a sink."""
MOST_NAMED = 10
"""Maximum number of names in one finding."""


def examine_sinks(status: Mapping[str, Any], oldest_seconds: float = OLDEST_SECONDS) -> Iterator[Finding]:
    """Yield the findings on each sink of ``status``, as far as the database answered."""
    for name, sink in status["sinks"].items():
        yield from _sink(name, sink, oldest_seconds)
    if status["unrouted"]:
        yield Finding(
            "types-without-a-route", "warning", "no sink receives events of some types",
            f"types among the newest events: {listed(status['unrouted'])}",
            "correct the type where it is emitted, or add a pattern for it to [routes]",
        )  # fmt: skip


def examine_shards(found: Sequence[Any], *, alive: bool) -> Iterator[Finding]:
    """Yield the findings on shards that have had no owner for ``UNOWNED_SECONDS``, if a relay is alive."""
    for each in found if alive else ():
        if not each.served:
            yield _unserved(each)
            continue
        severity = "critical" if each.shards == SHARDS else "warning"
        yield Finding(
            "shards-unowned", severity, f"no relay serves {'any shard' if each.shards == SHARDS else 'some shards'} "
            f"of sink {each.sink}",
            f"shards without an owner for {UNOWNED_SECONDS:.0f} s or longer: {each.shards} of {SHARDS}",
            "run outbox-relay sinks list: it shows which relays have the sink in their settings, and read their logs",
        )  # fmt: skip


def _unserved(each: Any) -> Finding:
    """Return the finding on a sink that no live relay serves."""
    return Finding(
        "sink-unserved", "critical", f"no live relay serves sink {each.sink}",
        f"shards without an owner for {UNOWNED_SECONDS:.0f} s or longer: {each.shards} of {SHARDS}",
        f"deploy a file that has the sink with its newest patterns, or run outbox-relay sinks remove {each.sink}",
    )  # fmt: skip


def examine_topics(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each sink with topics that accept no events while others do."""
    for sink in dict.fromkeys(each.sink for each in found):
        errors = [f"{each.error} ({each.waiting} rows)" for each in found if each.sink == sink]
        yield Finding(
            "topics-in-trouble", "warning", f"topics of sink {sink} accept no events; others do",
            listed(errors), "create the topic, or grant the relay access to it; its events are retried by themselves",
        )  # fmt: skip


def examine_relays(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on the relays of ``status``."""
    relays = status["relays"]
    if relays is None:
        return
    if not relays and status["sinks"]:
        yield Finding(
            "no-relay", "critical", "no relay is alive", "no relay was seen within 45 s, and none owns a shard",
            "start a relay with outbox-relay run, and read the log of the last one",
        )  # fmt: skip
    versions = sorted({relay["version"] for relay in relays})
    if len(versions) > 1:
        yield Finding(
            "relay-versions", "warning", "relays of different versions are running",
            f"versions: {listed(versions)}", "finish the rolling deployment: stop the relays of the older version",
        )  # fmt: skip


def examine_replays(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on the unfinished replays of ``status``."""
    for replay in status["replays"] or ():
        if replay["state"] == "paused":
            yield Finding(
                "replay-paused", "warning", f"replay {replay['id']} is paused",
                f"sink {replay['sink']}: {replay['delivered']} of {replay['total']} events are delivered; it keeps "
                "the days of its range",
                f"outbox-relay replay resume {replay['id']}, or outbox-relay replay cancel {replay['id']}",
            )  # fmt: skip


def _sink(name: str, sink: Mapping[str, Any], oldest_seconds: float) -> Iterator[Finding]:
    if sink["missing_positions"]:
        yield Finding(
            "missing-positions", "critical", f"sink {name} has shards without a position, which no relay serves",
            f"shards: {sink['missing_positions']} of 64",
            "stop every relay, then run outbox-relay rebase",
        )  # fmt: skip
    if sink["paused"]:
        reason = sink["paused_reason"]
        yield Finding(
            "sink-paused", "warning", f"sink {name} is paused: it gets no events",
            f"reason: {reason}" if reason else "no reason was given",
            f"run outbox-relay resume {name} once the cause is fixed",
        )  # fmt: skip
    circuit_seconds = sink["circuit_seconds"] or 0.0
    if sink["circuit"] != "closed":
        severity = "critical" if circuit_seconds > CIRCUIT_SECONDS else "warning"
        yield Finding(
            "destination-down", severity, f"the destination of sink {name} is down",
            f"the circuit has not been closed for {duration(circuit_seconds)}; last error: {sink['last_error']}",
            "repair the destination; delivery resumes by itself, and nothing is lost meanwhile",
        )  # fmt: skip
    if (sink["oldest_seconds"] or 0.0) > oldest_seconds and not sink["paused"]:
        severity = "critical" if sink["oldest_seconds"] > VERY_OLD_SECONDS else "warning"
        limited = f"; it gets {limits}" if (limits := limits_text(sink)) else ""
        advice = "if the destination works: run outbox-relay why for the oldest event, and see docs/performance.md"
        yield Finding(
            "sink-behind", severity, f"sink {name} is behind",
            f"its oldest event has waited for {duration(sink['oldest_seconds'])}; backlog: {sink['backlog']}{limited}",
            "raise its limits in the file if the destination can take more, and send SIGHUP" if limited else advice,
        )  # fmt: skip
    if sink["dead"]:
        yield Finding(
            "dead-letters", "warning", f"sink {name} has dead letters", f"dead letters: {sink['dead']}",
            f"outbox-relay dead summary --sink {name}, then dead retry or dead discard",
        )  # fmt: skip


def listed(names: list[str]) -> str:
    """Return at most ``MOST_NAMED`` names, and the number of the others."""
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
