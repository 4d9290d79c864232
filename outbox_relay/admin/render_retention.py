"""The results of the command retention as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_relay.admin.render import replace_unprintable, table
from outbox_relay.admin.retention import RetentionRun
from outbox_relay.retention.wording import keepers_text, left_text

DAY_HEADER = ("DAY", "EVENTS", "BYTES", "ARCHIVED", "EMPTIED", "KEPT BY")
FOR_ALL_TIME = (
    "events are kept indefinitely: to empty old days, write [retention] with keep_days in the file of every relay"
)
NO_FILE = (
    "a lower value in the files of the relays counts a day later, or at once if a role of migrate --grant-operate runs "
    "retention run"
)
"""Text for a number of days that is the database's default, or from an earlier time."""


def retention_text(found: dict[str, Any]) -> str:
    """Render the result of ``retention_status`` as a table."""
    days = [_day(day) for day in found["days"]]
    lines = [*_policy(found), *(table([DAY_HEADER, *days]) if days else ["the log has no events"])]
    return "\n".join(map(replace_unprintable, lines))


def _policy(found: dict[str, Any]) -> list[str]:
    if not found["keep_days"]:
        return [FOR_ALL_TIME]
    archived = ", archived before they are emptied" if found["archive"] else ""
    lines = [f"days are kept for {found['keep_days']} days after their end{archived}"]
    if found["lower_since"]:
        lines.append(f"a lower keep_days is configured since {found['lower_since']}; it takes effect a day later")
    if found["hold_until"]:
        lines.append(f"the clock has jumped, or no relay ran for a day: no day is emptied before {found['hold_until']}")
    if found["idle"]:
        since = f"since {found['last_pass'][:19]}" if found["last_pass"] else "yet"
        lines.append(f"no pass {since}: run a relay or retention run")
    return lines


def _day(day: dict[str, Any]) -> tuple[str, ...]:
    kept = keepers_text(day["kept_by"]) or (f"due{left_text(day)}" if day["due"] else "")
    numbers = ("" if day[name] is None else str(day[name]) for name in ("events", "bytes"))
    return day["day"], *numbers, day["archived"] or "", (day["emptied"] or "")[:19], kept


def preview_text(found: dict[str, Any]) -> str:
    """Render the result of ``preview_retention``."""
    lines = [
        f"{day['day']}: {'kept by ' + keepers_text(day['kept_by']) if day['kept_by'] else 'would be emptied'}"
        for day in found["days"]
    ]
    if found["hold_until"]:
        lines.append(f"the clock has jumped, or no relay ran for a day: no day is emptied before {found['hold_until']}")
    return "\n".join(map(replace_unprintable, lines or [_nothing_due(found["keep_days"], found["keep_days_of"])]))


def _nothing_due(keep_days: int, relays: Sequence[str]) -> str:
    """Return that no day is due, with the value that counts and the relays that have it."""
    if not keep_days:
        return FOR_ALL_TIME
    return f"no day is past keep_days, {keep_days}: " + (
        f"the largest value of the live relays, that of {', '.join(relays)}" if relays else NO_FILE
    )


def outcome_text(run: RetentionRun) -> str:
    """Render a pass."""
    policy, outcome, relays = run
    lines = [f"{day}: emptied" for day in outcome.emptied]
    lines += [f"{day}: left: {reason}" for day, reason in outcome.left.items()]
    lines += [f"{day}: its empty partition was removed" for day in outcome.dropped]
    lines += [f"uids removed: {outcome.uids}"] if outcome.uids else []
    lines += [f"marks of the inbox removed: {outcome.marks}"] if outcome.marks else []
    lines += [f"dead letters discarded: {outcome.dead}"] if outcome.dead else []
    lines += [f"partitions and rows of old attempts removed: {outcome.attempts}"] if outcome.attempts else []
    if policy.hold_until is not None:
        lines.append(
            f"the clock has jumped, or no relay ran for a day: no day is emptied before {policy.hold_until.isoformat()}"
        )
    if lines and not policy.keep_days:
        lines.append(FOR_ALL_TIME)
    return "\n".join(map(replace_unprintable, lines or [_nothing_due(policy.keep_days, relays)]))
