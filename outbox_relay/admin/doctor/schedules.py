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
    """Yield a finding for each schedule whose event is refused, and one for all that no relay fires."""
    for each in found:
        if each.refused:
            yield Finding(
                "schedule-refused", "warning", f"the schema refuses the event of schedule {each.name}",
                each.error, f"correct [schedules.{each.name}] in the file, then reload the relays",
            )  # fmt: skip
    if late := [each for each in found if not each.refused]:
        yield Finding(
            "schedule-late", "critical", "no relay fires schedules that are due",
            f"schedules: {listed([each.name for each in late])}; the oldest is late by {duration(late[0].late)}",
            "read the logs of the relays for schedule.failed; relays of an earlier version fire no schedule",
        )  # fmt: skip
