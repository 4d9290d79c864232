"""The judgement of a demo, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from outbox_relay.workbench.shop.arrivals import CheckResult, Latency

GRACE_SECONDS = 30.0
"""Added to the promised time of a recovery, since the machine may be busy with other work."""
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
    latency_before: Latency
    """Only of events that were emitted up to a second before the fault."""
    recovery_seconds: float
    """Time from the repair until events of every shard arrived again; infinite if they did not."""

    @property
    def sound(self) -> bool:
        """Return True if events arrived, and nothing was lost, phantom, out of order or wrongly signed."""
        return bool(self.check.committed) and self.check.sound and not self.refused_signatures


@dataclass(frozen=True)
class DemoReport:
    """The result of a run."""

    fault: str
    clause: str
    """What happened."""
    promised_seconds: float
    destinations: Sequence[DestinationResult]
    load_seconds: float
    rolled_back: int
    """Number of events whose transactions were rolled back; none of them may arrive."""
    dead: int
    """Number of dead letters that were made and retried."""

    @property
    def recovered(self) -> bool:
        """Return True if events flowed again in time at every destination."""
        limit = self.promised_seconds + GRACE_SECONDS
        return all(one.recovery_seconds <= limit for one in self.destinations)

    @property
    def sound(self) -> bool:
        """Return True if every guarantee was kept."""
        return self.recovered and all(one.sound for one in self.destinations)

    def json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`; a recovery that did not come is None."""
        return {
            **asdict(self),
            "sound": self.sound,
            "destinations": {
                one.name: {
                    **asdict(one),
                    "recovery_seconds": None if math.isinf(one.recovery_seconds) else one.recovery_seconds,
                }
                for one in self.destinations
            },
        }

    def text(self) -> str:
        """Return a table and an explanation of its figures."""
        rows = [["", *(f"{one.name} ({one.kind})" for one in self.destinations)]]
        rows += [[label, *(value(one) for one in self.destinations)] for label, value in ROWS]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip() for row in rows]
        return "\n".join((*table, "", *(fill(note, NOTE_WIDTH) for note in self._notes())))

    def _notes(self) -> list[str]:
        return [
            f"p50, p99 and longest are measured {MEASURED}",
            f"Half-way, {self.clause}. Events of every shard should flow again within {self.promised_seconds:g} s, "
            f"and on a busy machine within {self.promised_seconds + GRACE_SECONDS:g} s.",
            f"Another {self.rolled_back:,} events were emitted in transactions that were rolled back.",
            *([f"{self.dead} dead letters were made, retried and delivered."] if self.dead else []),
            "The delivery guarantees were kept." if self.sound else "The delivery guarantees were BROKEN.",
        ]


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1_000:,.0f} ms"


ROWS: Sequence[tuple[str, Callable[[DestinationResult], str]]] = (
    ("committed", lambda one: f"{one.check.committed:,}"),
    ("arrived", lambda one: f"{one.check.arrived:,}"),
    ("lost", lambda one: f"{one.check.lost:,}"),
    ("phantom", lambda one: f"{one.check.phantom:,}"),
    ("out of order", lambda one: f"{one.check.reordered:,}"),
    ("duplicates", lambda one: f"{one.check.duplicates:,}"),
    ("refused signatures", lambda one: f"{one.refused_signatures:,}" if one.kind == "webhook" else "-"),
    ("flowing again after", lambda one: f"{one.recovery_seconds:.1f} s"),
    ("p50 before the fault", lambda one: _shown(one.latency_before.p50_seconds)),
    ("p99 before the fault", lambda one: _shown(one.latency_before.p99_seconds)),
    ("p50 of the whole run", lambda one: _shown(one.latency.p50_seconds)),
    ("p99 of the whole run", lambda one: _shown(one.latency.p99_seconds)),
    ("longest", lambda one: _shown(one.latency.longest_seconds)),
)
