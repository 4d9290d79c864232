"""What the demo found: as text for people, as JSON for programs, and whether the promise was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from outbox_relay.workbench.demo.checker import CheckResult
from outbox_relay.workbench.demo.figures import Latency

MEASURED = (
    "from the call of emit in the shop's transaction, so its commit is included, to the first arrival at the "
    "destination: the consumer has read the record from the topic; the receiver has read the request, whose signature "
    "it then verifies. All by one machine's clock."
)
NOTE_WIDTH = 100


@dataclass(frozen=True)
class DestinationResult:
    """One destination's part."""

    name: str
    kind: str
    account: CheckResult
    refused_signatures: int
    took: Latency
    took_before_kill: Latency
    """Of the events that were emitted until a second before a relay was killed."""

    @property
    def sound(self) -> bool:
        """Nothing lost, made up, out of order or wrongly signed."""
        return self.account.sound and not self.refused_signatures


@dataclass(frozen=True)
class DemoReport:
    """The whole run."""

    destinations: Sequence[DestinationResult]
    load_seconds: float
    rolled_back: int
    """Events of transactions that were rolled back: none of them may arrive."""
    takeover_seconds: float | None
    """From the kill until living relays owned every shard again; None when all had arrived before that was seen."""

    @property
    def sound(self) -> bool:
        """Was every destination's part sound, and was there anything to judge?"""
        return all(one.sound and one.account.committed for one in self.destinations)

    def json(self) -> dict[str, Any]:
        """The report as JSON takes it."""
        return {
            "sound": self.sound,
            "load_seconds": self.load_seconds,
            "rolled_back": self.rolled_back,
            "takeover_seconds": _rounded(self.takeover_seconds, 1),
            "latency": MEASURED,
            "destinations": {one.name: _json(one) for one in self.destinations},
        }

    def text(self) -> str:
        """The report for people: a table, and what its figures mean."""
        rows = [["", *(f"{one.name} ({one.kind})" for one in self.destinations)]]
        rows += [[label, *(value(one) for one in self.destinations)] for label, value in ROWS]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
        return "\n".join((*table, "", *(fill(note, NOTE_WIDTH) for note in self._notes())))

    def _notes(self) -> list[str]:
        takeover = "" if self.takeover_seconds is None else f" after {self.takeover_seconds:.1f} s"
        return [
            f"p50, p99, longest: {MEASURED}",
            f"One of two relays was killed with SIGKILL in the middle; its shards were taken over{takeover}.",
            f"{self.rolled_back:,} more events were emitted in transactions that were rolled back.",
            "The promise was kept." if self.sound else "The promise was BROKEN.",
        ]


def _json(one: DestinationResult) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "committed": one.account.committed,
        "arrived": one.account.arrived,
        "lost": one.account.lost,
        "made_up": one.account.phantom,
        "out_of_order": one.account.reordered,
        "duplicates": one.account.duplicates,
        "refused_signatures": one.refused_signatures,
        **_milliseconds(one.took),
        "before_kill": _milliseconds(one.took_before_kill),
    }


def _milliseconds(took: Latency) -> dict[str, float | None]:
    return {
        "p50_ms": _rounded(took.p50_seconds, 4, 1_000),
        "p99_ms": _rounded(took.p99_seconds, 4, 1_000),
        "longest_ms": _rounded(took.longest_seconds, 4, 1_000),
    }


def _rounded(value: float | None, digits: int, times: float = 1) -> float | None:
    return None if value is None else round(round(value, digits) * times, digits)


def format_latency(seconds: float | None) -> str:
    """A latency for people."""
    return "-" if seconds is None else f"{seconds * 1_000:,.0f} ms"


ROWS: Sequence[tuple[str, Callable[[DestinationResult], str]]] = (
    ("committed", lambda one: f"{one.account.committed:,}"),
    ("arrived", lambda one: f"{one.account.arrived:,}"),
    ("lost", lambda one: f"{one.account.lost:,}"),
    ("made up", lambda one: f"{one.account.phantom:,}"),
    ("out of order", lambda one: f"{one.account.reordered:,}"),
    ("duplicates", lambda one: f"{one.account.duplicates:,}"),
    ("refused signatures", lambda one: f"{one.refused_signatures:,}" if one.kind == "webhook" else "-"),
    ("p50 before the kill", lambda one: format_latency(one.took_before_kill.p50_seconds)),
    ("p99 before the kill", lambda one: format_latency(one.took_before_kill.p99_seconds)),
    ("p50 of the whole run", lambda one: format_latency(one.took.p50_seconds)),
    ("p99 of the whole run", lambda one: format_latency(one.took.p99_seconds)),
    ("longest", lambda one: format_latency(one.took.longest_seconds)),
)
