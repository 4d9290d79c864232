"""The report of a drill, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outbox_relay.workbench.drill.judgement import Check


@dataclass(frozen=True)
class DrillReport:
    """The judgement of one drill, and the lines that were shown meanwhile."""

    drill: str
    checks: Sequence[Check]
    observed: Sequence[str]
    seconds: float
    load: float
    """Load of the machine in the last minute."""
    processors: int

    @property
    def kept(self) -> bool:
        """Return True if every promise was kept."""
        return all(check.kept for check in self.checks)

    def json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`."""
        return {
            "drill": self.drill,
            "kept": self.kept,
            "seconds": round(self.seconds, 1),
            "load": round(self.load, 1),
            "processors": self.processors,
            "checks": [asdict(check) for check in self.checks],
            "observed": list(self.observed),
        }

    def text(self) -> str:
        """Return a table and the result."""
        rows = [("", "found", "promised", "")]
        rows += [(each.what, each.found, each.promised, "kept" if each.kept else "NOT KEPT") for each in self.checks]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join((*table, "", self._result()))

    def _result(self) -> str:
        took = f"{self.drill}, {self.seconds:.0f} s, load of the machine {self.load:.1f} on {self.processors} cores"
        if self.kept:
            return f"{took}: every promise was kept."
        only_late = all(each.kept or each.of_time for each in self.checks)
        excuse = only_late and self.load > self.processors
        busy = ", or repeat it with --grace, since the machine is busy" if excuse else ""
        return f"{took}: a promise was NOT KEPT. See docs/reliability.md{busy}."
