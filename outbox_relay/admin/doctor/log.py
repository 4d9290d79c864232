"""The checks of the log and its retention. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from outbox_relay.admin.doctor.finding import Finding, listed
from outbox_relay.retention.wording import LOCKED, PASSING, keepers_text, left_text

LEAST_AHEAD_SECONDS: Final = 86_400.0
"""Time for which partitions must exist in advance."""
LATE_SECONDS: Final = 86_400.0
"""Time after keep_days within which a day is archived and emptied if all is well."""


def examine_retention(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on days that are past keep_days and still hold events, from ``retention status``."""
    due = [day for day in found["days"] if day["due"]]
    if found["hold_until"]:
        yield Finding(
            "clock-jumped", "warning",
            "the clock of the database has jumped, or no relay ran for a day: no day is emptied",
            f"until {found['hold_until']}",
            "check the clock of the database's machine; if it is right, wait: emptying resumes then",
        )  # fmt: skip
    kept = [day for day in due if day["kept_by"]]
    if kept:
        reasons = listed(sorted({keepers_text(day["kept_by"]) for day in kept}))
        yield Finding(
            "retention-blocked", "warning",
            f"{len(kept)} days past keep_days ({found['keep_days']}) are not emptied: the log grows",
            f"{_span(kept)}: kept by {reasons}",
            "resume, repair or remove what keeps them; outbox-relay retention status shows each day",
        )  # fmt: skip
    if not found["hold_until"] and not found["idle"]:
        yield from _examine_late(due, found)
    if due and found["idle"]:
        yield Finding(
            "retention-idle", "warning", "no relay empties the log",
            f"{len(due)} days are past keep_days; last pass: {found['last_pass'] or 'none'}",
            "set [retention] enabled = true on a relay, or run outbox-relay retention run from a timer",
        )  # fmt: skip


def _examine_late(due: list[Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings on days that nothing keeps and that passes have not emptied."""
    free = [day for day in due if not day["kept_by"]]
    late = [day for day in free if (day["due_seconds"] or 0.0) > LATE_SECONDS]
    failed = [day for day in free if not (day["left_because"] or LOCKED).startswith(PASSING)]
    waiting = [day for day in free if found["archive"] and not day["archived"] and (day in late or day in failed)]
    if waiting:
        yield Finding(
            "archive-missing", "warning", f"{len(waiting)} days past keep_days have no verified archive",
            f"{_span(waiting)}{_left(waiting)}; last pass: {found['last_pass'] or 'none'}",
            "check [retention] archive, its credentials or the rights on its directory; outbox-relay retention run "
            "tries again at once",
        )  # fmt: skip
    rest = [day for day in late if day not in waiting]
    if rest:
        yield Finding(
            "retention-late", "warning", f"{len(rest)} days past keep_days are not emptied, and nothing keeps them",
            f"{_span(rest)}{_left(rest)}; last pass: {found['last_pass'] or 'none'}",
            "run outbox-relay retention run: it says what it cannot lock; then end the sessions that read the log",
        )  # fmt: skip


def examine_partitions(in_default: int, ahead_seconds: float) -> Iterator[Finding]:
    """Yield the findings on partitions, which exist for ``ahead_seconds`` in advance."""
    if in_default:
        yield Finding(
            "default-partition", "warning", "events are in the DEFAULT partition",
            f"events, up to a limit: {in_default}",
            "if none runs, start a relay, which makes partitions for the days to come: retention empties the DEFAULT "
            "partition once its events are old enough, and until then nothing else is needed",
        )  # fmt: skip
    if ahead_seconds < LEAST_AHEAD_SECONDS:
        yield Finding(
            "partitions-missing", "warning", "the partitions of the next day do not exist",
            f"they end in {ahead_seconds / 3600:.1f} hours, or have a gap then",
            "start a relay, and check its log for partition errors",
        )  # fmt: skip


def _span(days: list[Any]) -> str:
    names = [day["day"] for day in days]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _left(days: list[Any]) -> str:
    """Return why the oldest of these days was left, as the end of a sentence: its lock is asked for first."""
    return next((text for day in days if (text := left_text(day))), "")
