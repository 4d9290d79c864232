"""Reports of a run as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.nemesis import Strike
from tests.chaos.oracle import Account
from tests.chaos.outcome import Outcome
from tests.chaos.recovery import NEVER, Recovery, recoveries

SINK_TITLES = {"kafka": "Kafka", "webhook": "webhook", "jobs": "rows", "calls": "python", "effects": "transaction"}


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return all figures for JSON."""
    found = outcome.reconciled
    return {
        "form": outcome.form.name,
        "seed": outcome.seed,
        "sound": not outcome.record.failures,
        "failures": outcome.record.failures,
        "seconds": outcome.seconds,
        "load": outcome.load,
        "strikes": [[round(s.began, 3), round(s.healed, 3), s.fault, s.detail] for s in outcome.record.strikes],
        "faults": dict(sorted(outcome.record.counts.items())),
        "events": found.committed,
        "writers": {
            **{end: found.by_end[end] for end in ("ok", "rolled back", "unknown")},
            "unknown and committed": found.unknown_committed,
            "taken back by a restore": found.taken_back,
            "vanished": len(found.vanished),
            "rolled back and there": len(found.risen),
            "of nobody": len(found.strangers),
        },
        "refused signatures": outcome.refused,
        "unique keys": {"emitted": outcome.unique, "merged": outcome.merged},
        "times of schedules": outcome.ticks,
        "sinks": {sink: _account(account) for sink, account in outcome.accounts.items()},
        "recovery alone": [_recovery(r) for r in _recoveries(outcome, outcome.record.alone)],
        "recovery": [_recovery(r) for r in _recoveries(outcome, outcome.record.strikes)],
    }


def markdown(outcome: Outcome) -> str:
    """Return the tables of docs/reliability.md."""
    accounts = list(outcome.accounts.values())
    sinks = [SINK_TITLES[account.sink] for account in accounts]
    counted = [
        ["events", *(f"{a.committed:,}" for a in accounts)],
        ["arrivals", *(f"{a.arrived:,}" for a in accounts)],
        ["lost", *(str(a.lost) for a in accounts)],
        ["taken back by a restore", *(f"{a.taken_back:,}" for a in accounts)],
        ["untimely", *(str(a.untimely) for a in accounts)],
        ["phantom", *(str(a.phantom) for a in accounts)],
        ["reordered", *(str(a.reordered) for a in accounts)],
        ["stuck", *(str(a.stuck) for a in accounts)],
        ["poison, dead", *(str(a.poisoned) for a in accounts)],
        ["dead letters", *(str(a.dead) for a in accounts)],
        ["dead letters for no reason", *(str(a.condemned) for a in accounts)],
        ["duplicates", *(f"{a.duplicates.total():,}" for a in accounts)],
        ["duplicates that no fault explains", *(str(len(a.unexplained)) for a in accounts)],
        [
            "refused for a wrong clock in the signature",
            *(str(outcome.refused) if a.sink == "webhook" else "" for a in accounts),
        ],
    ]
    faults = [
        [fault, str(count), *(f"{a.duplicates[fault]:,}" for a in accounts)]
        for fault, count in sorted(outcome.record.counts.items())
    ]
    return "\n\n".join(
        [
            f"Form {outcome.form.name}, seed {outcome.seed}, {sum(outcome.seconds.values()):.0f} s, load of the"
            f" machine {outcome.load.get('storm', '?')}.",
            f"Unique keys: {outcome.unique:,} events, and {outcome.merged:,} calls that were merged into them."
            f" Schedules: {outcome.ticks:,} times.",
            _table(["", *sinks], counted),
            _table(["fault", "injected", *(f"duplicates, {sink}" for sink in sinks)], faults),
            "Seconds until an event that was emitted after the fault had arrived, of faults that struck alone:",
            _table(RECOVERY_HEAD, _rows(_recoveries(outcome, outcome.record.alone))),
            "The same for all faults, most of which were followed by another before the system had recovered. The"
            " promise is not about these:",
            _table(RECOVERY_HEAD, _rows(_recoveries(outcome, outcome.record.strikes))),
        ]
    )


def write(outcome: Outcome, path: Path) -> None:
    """Write the figures to `path` as JSON and Markdown, with the suffixes .json and .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(as_dict(outcome), indent=2) + "\n")
    path.with_suffix(".md").write_text(markdown(outcome) + "\n")


def _recoveries(outcome: Outcome, strikes: Iterable[Strike]) -> list[Recovery]:
    return recoveries(strikes, outcome.flows["kafka"], outcome.last_emit) if "kafka" in outcome.flows else []


def _account(account: Account) -> dict[str, Any]:
    return {
        "committed": account.committed,
        "arrived": account.arrived,
        "poison, dead": account.poisoned,
        "dead": account.dead,
        "dead for no reason": account.condemned,
        "lost": account.lost,
        "stuck": account.stuck,
        "taken back": account.taken_back,
        "untimely": account.untimely,
        "phantom": account.phantom,
        "reordered": account.reordered,
        "duplicates": dict(account.duplicates),
        "unexplained duplicates": len(account.unexplained),
        "examples": account.examples,
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "fault": recovery.fault,
        "strikes": recovery.strikes,
        "first of any shard, median": _seconds(recovery.resumed_median),
        "first of any shard, most": _seconds(recovery.resumed_most),
        "every shard, median": _seconds(recovery.everywhere_median),
        "every shard, most": _seconds(recovery.everywhere_most),
        "promised": recovery.promised,
    }


RECOVERY_HEAD = [
    "fault", "strikes", "any shard, median", "any shard, most", "every shard, median", "every shard, most", "promised",
]  # fmt: skip


def _rows(found: Sequence[Recovery]) -> list[list[str]]:
    return [["" if value is None else str(value) for value in _recovery(recovery).values()] for recovery in found]


def _seconds(value: float) -> float | str:
    return "never" if value == NEVER else round(value, 2)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
