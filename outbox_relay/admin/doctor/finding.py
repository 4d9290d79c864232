"""One finding of ``doctor``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

Severity = Literal["critical", "warning", "ok"]
ORDER: Final[tuple[Severity, ...]] = ("critical", "warning", "ok")
"""The severities, worst first. ``ok`` says what could not be examined."""
MOST_NAMED: Final = 10
"""Maximum number of names in one finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: a sentence, the figures behind it, and the advice.

    ``id`` is a section of the runbook. ``statements`` are the SQL statements of the advice, complete, to be run by a
    person: they name what was found, so that none ends anything else.
    """

    id: str
    severity: Severity
    summary: str
    evidence: str
    advice: str
    statements: Sequence[str] = ()

    @property
    def runbook(self) -> str:
        """The place of the finding in the documentation."""
        return f"docs/runbook.md#{self.id}"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for ``doctor --json``."""
        return {**asdict(self), "statements": list(self.statements), "runbook": self.runbook}


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by severity, those of one severity in their order."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))


def listed(names: Sequence[str]) -> str:
    """Return at most ``MOST_NAMED`` names, and the number of the others."""
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
