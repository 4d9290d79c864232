"""Findings as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.admin.doctor.finding import RUNBOOK, Finding
from outbox_relay.admin.text import replace_unprintable

HEALTHY = "no problems found"


def findings_text(findings: Sequence[Finding]) -> str:
    """Render findings in paragraphs."""
    lines = [line for finding in findings for line in _paragraph(finding)]
    if all(finding.severity == "ok" for finding in findings):
        lines += [HEALTHY if not findings else "nothing else was found"]
    return "\n".join(map(replace_unprintable, lines))


def _paragraph(finding: Finding) -> list[str]:
    return [
        f"{finding.severity.upper()}  {finding.summary}",
        f"  {finding.evidence}",
        f"  do: {finding.advice} ({RUNBOOK}#{finding.id})",
        *(f"  sql: {statement}" for statement in finding.statements if statement.isprintable()),
        "",
    ]
