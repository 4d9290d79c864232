"""The text of answers."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_relay import admin
from outbox_relay.admin.text import aligned, duration, replace_unprintable

SINK: dict[str, Any] = {
    "backlog": 3,
    "backlog_exact": True,
    "oldest_seconds": 320.5,
    "waiting": 1,
    "held": 2,
    "dead": 0,
    "scheduled": 4,
    "circuit": "closed",
    "circuit_seconds": None,
    "in_flight_limit": None,
    "rate_per_second": None,
    "max_in_flight_total": None,
    "paused": False,
    "paused_reason": None,
    "last_error": None,
    "last_error_at": None,
    "last_error_seconds_ago": None,
    "last_error_mended_at": None,
    "last_error_mended_seconds_ago": None,
    "unowned": 0,
    "missing_positions": 0,
}
RELAY: dict[str, Any] = {
    "name": "a:1",
    "version": "0.1.0",
    "seen_seconds_ago": 0.4,
    "shards": {"crm": 32, "events": 64},
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (320.9, "5 min 20 s"),
        (11_520, "3 h 12 min"),
        (367_200, "4 d 6 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_columns_are_aligned_without_trailing_space() -> None:
    assert aligned([("A", "LONG"), ("long", "b"), ("", "c")]) == ["A     LONG", "long  b", "      c"]
    assert aligned([]) == []


def test_control_characters_are_replaced() -> None:
    assert replace_unprintable("a\x1b[2Jb\u202ec\nd") == "a?[2Jb?c?d"


RETENTION: dict[str, Any] = {"keep_days": 30, "hold_until": None, "idle": False, "last_pass": None, "blocked": []}


def test_days_that_are_kept_are_grouped_by_their_reason() -> None:
    crm = [{"kind": "sink", "name": "crm", "paused": True, "shards": 12, "since": "2026-11-02T08:00:00+00:00"}]
    blocked: list[dict[str, Any]] = [
        {"day": f"2026-10-0{n}", "kept_by": crm if n < 3 else [], "since": None, "left_because": None}
        for n in range(1, 5)
    ]
    blocked[2] |= {"left_because": "the archive was not written", "left_at": "2026-11-02T08:00:00.5+00:00"}
    found: dict[str, Any] = {
        "relays": [],
        "sinks": {},
        "unrouted": [],
        "in_default_partition": 0,
        "retention": {"keep_days": 30, "hold_until": None, "idle": True, "last_pass": None, "blocked": blocked},
    }
    assert admin.status_text(found).splitlines()[4:] == [
        "days past keep_days (30) that are not emptied: 4",
        "no relay empties days, no pass yet: set [retention] enabled = true, or run retention run",
        "  2026-10-01 to 2026-10-02: kept by sink crm (paused) with 12 shards since 2026-11-02T08:00:00+00:00",
        "  2026-10-03: due at the next pass; left at 2026-11-02T08:00:00: the archive was not written",
        "  2026-10-04: due at the next pass",
    ]


def test_status_of_two_sinks() -> None:
    slow = {**SINK, "backlog": 812000, "backlog_exact": False, "circuit": "open", "paused": True, "last_error": "away"}
    found = {
        "relays": [RELAY],
        "sinks": {"crm": SINK, "events": slow},
        "unrouted": ["a.b", "c"],
        "in_default_partition": 7,
        "retention": RETENTION,
    }
    assert admin.status_text(found).splitlines() == [
        "SINK    BACKLOG  OLDEST      WAITING  HELD  DEAD  SCHEDULED  CIRCUIT  PAUSED  UNOWNED",
        "crm     3        5 min 20 s  1        2     0     4          closed   no      0",
        "events  ~812000  5 min 20 s  1        2     0     4          open     yes     0",
        "last error of events: away",
        "",
        "RELAY  VERSION  SEEN       SHARDS",
        "a:1    0.1.0    0.4 s ago  crm 32, events 64",
        "",
        "types without a route, among the newest events: a.b, c",
        "",
        "events in the DEFAULT partition of the log: 7; start a relay, which makes partitions",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"last_error": "away", "last_error_seconds_ago": 185.0}, "last error of crm, 3 min 5 s ago: away"),
        ({"last_error": "away"}, "last error of crm: away"),
        ({"last_error_seconds_ago": 185.0, "last_error_mended_seconds_ago": 120.4, "mended_error": "away"},
         "last error of crm, 3 min 5 s ago, over for 2 min 0 s: away"),
        ({"last_error_seconds_ago": 5000.0, "last_error_mended_seconds_ago": 3600.0}, None),
        ({}, None),
    ],
    ids=["open", "of an unknown time", "mended", "mended long ago", "none"],
)  # fmt: skip
def test_the_last_error_has_a_line_until_an_hour_after_its_end(changes: dict[str, Any], line: str | None) -> None:
    sinks = {"crm": {**SINK, **changes}}
    text = admin.status_text(
        {"relays": [], "sinks": sinks, "unrouted": [], "in_default_partition": 0, "retention": RETENTION}
    )
    assert [each for each in text.splitlines() if each.startswith("last error")] == ([line] if line else [])


def test_only_sinks_over_the_limit_are_too_old() -> None:
    found = {"sinks": {"a": {**SINK, "oldest_seconds": 60.0}, "b": {**SINK, "oldest_seconds": 60.1}}}
    assert admin.too_old(found, 60) == ["sink b: its oldest event has waited for 60.1 s, more than 60 s"]
