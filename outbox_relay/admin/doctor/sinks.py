"""The checks of sinks, replays and relays, from the result of ``status``, and of schedules. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from outbox_relay.admin.doctor.finding import Finding, listed
from outbox_relay.admin.text import duration, limits_text
from outbox_relay.admin.thresholds import OLDEST_SECONDS

VERY_OLD_SECONDS: Final = 3600.0
"""Age from which that is critical."""
CIRCUIT_SECONDS: Final = 300.0
"""Time without a closed circuit from which a destination that is down is critical."""
UNOWNED_SECONDS: Final = 30.0
"""Time without an owner from which a shard is reported: two default leases. Less is normal after a relay stopped."""
SHARDS: Final = 64
"""Number of shards of a sink."""


def is_troubled(sink: Mapping[str, Any], oldest_seconds: float) -> bool:
    """Return True if the oldest event of a sink of ``status`` is to be named."""
    unsettled = sink["backlog"] is None or sink["backlog"] > 0
    is_old = (sink["oldest_seconds"] or 0.0) > oldest_seconds
    return unsettled and bool(is_old or sink["circuit"] != "closed" or sink["last_error"] or sink["waiting"])


def examine_sinks(
    status: Mapping[str, Any], oldest_seconds: float = OLDEST_SECONDS, oldest: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """Yield the findings on each sink of ``status``, as far as the database answered.

    ``oldest`` has the row of ``doctor_oldest`` for sinks that are troubled.
    """
    for name, sink in status["sinks"].items():
        yield from _sink(name, sink, oldest_seconds, (oldest or {}).get(name))
    if status["unrouted"] and (status["sinks"] or status["relays"]):
        yield Finding(
            "types-without-a-route", "warning", "no sink receives events of some types",
            f"types among the newest events: {listed(status['unrouted'])}",
            "correct the type where it is emitted, or add a pattern for it to [routes]",
        )  # fmt: skip


def examine_shards(found: Sequence[Any], *, alive: bool) -> Iterator[Finding]:
    """Yield the findings on shards that have had no owner for ``UNOWNED_SECONDS``, if a relay is alive."""
    for each in found if alive else ():
        evidence = f"shards without an owner for {UNOWNED_SECONDS:.0f} s or longer: {each.shards} of {SHARDS}"
        if not each.served:
            yield Finding(
                "sink-unserved", "critical", f"no live relay serves sink {each.sink}", evidence,
                "deploy a file that has the sink with its newest patterns, or run outbox-relay sinks remove "
                f"{each.sink}",
            )  # fmt: skip
        else:
            is_whole = each.shards == SHARDS
            yield Finding(
                "shards-unowned", "critical" if is_whole else "warning",
                f"no relay serves {'any shard' if is_whole else 'some shards'} of sink {each.sink}", evidence,
                "run outbox-relay sinks list: it shows which relays have the sink in their settings, and read their "
                "logs",
            )  # fmt: skip


def examine_topics(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each sink with topics that accept no events while others do."""
    for sink in dict.fromkeys(each.sink for each in found):
        errors = [f"{each.error} ({each.waiting} rows)" for each in found if each.sink == sink]
        yield Finding(
            "topics-in-trouble", "warning", f"topics of sink {sink} accept no events; others do",
            listed(errors), "create the topic, or grant the relay access to it; its events are retried by themselves",
        )  # fmt: skip


def examine_numbering(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding if the log has the numbers of another server, with which no relay works."""
    if any(each.foreign_numbers for each in found):
        yield Finding(
            "rebase-needed", "critical", "the database was restored or moved: relays refuse to work on it",
            "the numbers of the log are those of another cluster, or are ahead of this one",
            "stop every relay, run outbox-relay rebase, then start the relays",
        )  # fmt: skip


def examine_relays(status: Mapping[str, Any], *, restored: bool = False) -> Iterator[Finding]:
    """Yield the findings on the relays of ``status``. In a restored database none is missed."""
    relays = status["relays"]
    if relays is None:
        return
    silent = [relay for relay in relays if relay["stale"] and not any(relay["shards"].values())]
    if len(silent) == len(relays) and not restored and (status["sinks"] or status["unrouted"]):
        last = min((relay["seen_seconds_ago"] for relay in silent), default=None)
        yield Finding(
            "no-relay", "critical", "no relay is alive",
            "no relay was seen within 45 s, and none owns a shard" if last is None
            else f"the last heartbeat of a relay was {duration(last)} ago, and none owns a shard",
            "start a relay with outbox-relay run, and read the log of the last one",
        )  # fmt: skip
    else:
        for relay in silent:
            yield Finding(
                "relay-silent", "warning", f"relay {relay['name']} is silent",
                f"its last heartbeat was {duration(relay['seen_seconds_ago'])} ago, and it owns no shard any more",
                "look at its process and its log: it hangs, was killed or cannot reach the database; after 45 s it is "
                "no longer listed",
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


def _sink(name: str, sink: Mapping[str, Any], oldest_seconds: float, oldest: Any) -> Iterator[Finding]:
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
    yield from _undelivered(name, sink, oldest_seconds, oldest)
    if sink["dead"]:
        yield Finding(
            "dead-letters", "warning", f"sink {name} has dead letters", f"dead letters: {sink['dead']}",
            f"outbox-relay dead summary --sink {name}, then dead retry or dead discard",
        )  # fmt: skip


def _undelivered(name: str, sink: Mapping[str, Any], oldest_seconds: float, oldest: Any) -> Iterator[Finding]:
    """Yield the findings on events that do not arrive: the destination is down, some fail, or the sink is behind."""
    is_down, uid = sink["circuit"] != "closed", oldest and oldest.uid
    error = sink["last_error"] or (oldest and oldest.error)
    if is_down:
        seconds = sink["circuit_seconds"] or 0.0
        yield Finding(
            "destination-down", "critical" if seconds > CIRCUIT_SECONDS else "warning",
            f"the destination of sink {name} is down",
            f"the circuit has not been closed for {duration(seconds)}; last error: {error}"
            + (f"; oldest event: {uid}" if uid else ""),
            "repair the destination; delivery resumes by itself, and nothing is lost meanwhile",
        )  # fmt: skip
    waited = sink["oldest_seconds"] or 0.0
    if waited > oldest_seconds and not sink["paused"]:
        limits = limits_text(sink)
        facts = [f"its oldest event has waited for {duration(waited)}", f"backlog: {sink['backlog']}"]
        facts += [f"it gets {limits}"] if limits else []
        facts += [f"last error: {error}"] if error and not is_down else []
        facts += [f"oldest event: {uid}"] if uid else []
        yield Finding(
            "sink-behind", "critical" if waited > VERY_OLD_SECONDS else "warning", f"sink {name} is behind",
            "; ".join(facts), _catch_up(limits, uid, error, is_down=is_down),
        )  # fmt: skip
    elif error and not is_down and not sink["paused"] and sink["backlog"]:
        failing = oldest and (oldest.failing_uid or uid)
        yield Finding(
            "events-failing", "warning", f"events of sink {name} fail, and are tried again",
            f"rows: {sink['waiting']} waiting, {sink['held']} held behind one of their key; last error: "
            f"{(oldest and oldest.error) or error}" + (f"; oldest event that fails: {failing}" if failing else ""),
            f"run outbox-relay why {failing or 'for an event'}: it shows the attempts, and what waits behind it",
        )  # fmt: skip


def _catch_up(limits: str, uid: Any, error: str | None, *, is_down: bool) -> str:
    """Return what to do about a sink that is behind."""
    if is_down:
        return "repair the destination; then it catches up by itself"
    if limits and not error:
        return "raise its limits in the file if the destination can take more, and send SIGHUP"
    why = f"run outbox-relay why {uid or 'for its oldest event'}"
    return f"repair what fails: {why}" if error else f"{why}; if it catches up, wait, and see docs/performance.md"


def examine_schedules(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each schedule that fails, and one for all others that are late."""
    for each in found:
        if each.refused:
            yield Finding(
                "schedule-refused", "warning", f"the schema refuses the event of schedule {each.name}",
                each.error, f"correct [schedules.{each.name}] in the file, then reload the relays",
            )  # fmt: skip
        elif each.error is not None:
            yield Finding(
                "schedule-failing", "warning", f"a relay cannot fire schedule {each.name}",
                f"{each.error}; {_lateness(each.late)}",
                "remove the cause that the relay names, or schedules remove a schedule that is no longer needed",
            )  # fmt: skip
    if late := [each for each in found if each.error is None]:
        yield Finding(
            "schedule-late", "critical", "schedules are late",
            f"schedules: {listed([each.name for each in late])}; the oldest is {_lateness(late[0].late)}",
            "read the logs of the relays for housekeeping.failed with the chore schedules; relays of an earlier "
            "version fire no schedule",
        )  # fmt: skip


def _lateness(seconds: float) -> str:
    return f"late by {duration(seconds)}" if seconds > 0 else "not yet due"
