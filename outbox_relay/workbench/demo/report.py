"""The report of the demo, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from outbox_relay.workbench.shop.checker import CheckResult
from outbox_relay.workbench.shop.figures import Latency

MEASURED = (
    "from the call of emit in the shop's transaction (the commit is included) to the first arrival at the destination: "
    "when the consumer has read the record from the topic, or when the receiver has read the request, before it "
    "verifies the signature. All times are taken from one machine's clock."
)
NOTE_WIDTH = 100


@dataclass(frozen=True)
class DestinationResult:
    """The deliveries to one destination."""

    name: str
    kind: str
    check: CheckResult
    refused_signatures: int
    latency: Latency
    latency_before_kill: Latency
    """Only of events that were emitted up to a second before the kill."""

    @property
    def sound(self) -> bool:
        """Return True if nothing was lost, phantom, out of order or wrongly signed."""
        return self.check.sound and not self.refused_signatures


@dataclass(frozen=True)
class DemoReport:
    """The result of a run."""

    destinations: Sequence[DestinationResult]
    load_seconds: float
    rolled_back: int
    """Number of events whose transactions were rolled back; none of them may arrive."""
    takeover_seconds: float | None
    """Time from the kill until living relays owned every shard; None if the run ended before that."""

    @property
    def sound(self) -> bool:
        """Return True if every destination received events and all its deliveries were sound."""
        return all(one.sound and one.check.committed for one in self.destinations)

    def json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`."""
        return {
            "sound": self.sound,
            "load_seconds": self.load_seconds,
            "rolled_back": self.rolled_back,
            "takeover_seconds": _rounded(self.takeover_seconds, 1),
            "latency": MEASURED,
            "destinations": {one.name: _json(one) for one in self.destinations},
        }

    def text(self) -> str:
        """Return a table and an explanation of its figures."""
        rows = [["", *(f"{one.name} ({one.kind})" for one in self.destinations)]]
        rows += [[label, *(value(one) for one in self.destinations)] for label, value in ROWS]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
        return "\n".join((*table, "", *(fill(note, NOTE_WIDTH) for note in self._notes())))

    def _notes(self) -> list[str]:
        takeover = "" if self.takeover_seconds is None else f" after {self.takeover_seconds:.1f} s"
        return [
            f"p50, p99 and longest are measured {MEASURED}",
            f"One of the two relays was killed with SIGKILL half-way; the others took over its shards{takeover}.",
            f"Another {self.rolled_back:,} events were emitted in transactions that were rolled back.",
            "The delivery guarantees were kept." if self.sound else "The delivery guarantees were BROKEN.",
        ]


def _json(one: DestinationResult) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "committed": one.check.committed,
        "arrived": one.check.arrived,
        "lost": one.check.lost,
        "made_up": one.check.phantom,
        "out_of_order": one.check.reordered,
        "duplicates": one.check.duplicates,
        "refused_signatures": one.refused_signatures,
        **_milliseconds(one.latency),
        "before_kill": _milliseconds(one.latency_before_kill),
    }


def _milliseconds(latency: Latency) -> dict[str, float | None]:
    return {
        "p50_ms": _rounded(latency.p50_seconds, 4, 1_000),
        "p99_ms": _rounded(latency.p99_seconds, 4, 1_000),
        "longest_ms": _rounded(latency.longest_seconds, 4, 1_000),
    }


def _rounded(value: float | None, digits: int, factor: float = 1) -> float | None:
    return None if value is None else round(round(value, digits) * factor, digits)


def format_latency(seconds: float | None) -> str:
    """Return a latency in milliseconds for display."""
    return "-" if seconds is None else f"{seconds * 1_000:,.0f} ms"


ROWS: Sequence[tuple[str, Callable[[DestinationResult], str]]] = (
    ("committed", lambda one: f"{one.check.committed:,}"),
    ("arrived", lambda one: f"{one.check.arrived:,}"),
    ("lost", lambda one: f"{one.check.lost:,}"),
    ("phantom", lambda one: f"{one.check.phantom:,}"),
    ("out of order", lambda one: f"{one.check.reordered:,}"),
    ("duplicates", lambda one: f"{one.check.duplicates:,}"),
    ("refused signatures", lambda one: f"{one.refused_signatures:,}" if one.kind == "webhook" else "-"),
    ("p50 before the kill", lambda one: format_latency(one.latency_before_kill.p50_seconds)),
    ("p99 before the kill", lambda one: format_latency(one.latency_before_kill.p99_seconds)),
    ("p50 of the whole run", lambda one: format_latency(one.latency.p50_seconds)),
    ("p99 of the whole run", lambda one: format_latency(one.latency.p99_seconds)),
    ("longest", lambda one: format_latency(one.latency.longest_seconds)),
)
