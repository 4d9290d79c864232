"""The check of schedules. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outbox_relay.admin.doctor.finding import Finding
from outbox_relay.admin.doctor.sinks import listed
from outbox_relay.admin.text import duration

LATE_SECONDS = 60.0
"""Lateness from which a time of a schedule is reported."""


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
