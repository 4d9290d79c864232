"""The text of answers."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_relay import admin
from outbox_relay.admin.render import duration, replace_unprintable, table

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
    "paused": False,
    "paused_reason": None,
    "last_error": None,
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
    assert table([("A", "LONG"), ("long", "b"), ("", "c")]) == ["A     LONG", "long  b", "      c"]
    assert table([]) == []


def test_control_characters_are_replaced() -> None:
    assert replace_unprintable("a\x1b[2Jb\u202ec\nd") == "a?[2Jb?c?d"


def test_status_of_two_sinks() -> None:
    slow = {**SINK, "backlog": 812000, "backlog_exact": False, "circuit": "open", "paused": True, "last_error": "away"}
    found = {
        "relays": [RELAY],
        "sinks": {"crm": SINK, "events": slow},
        "unrouted": ["a.b", "c"],
        "in_default_partition": 7,
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
        "events in the DEFAULT partition of the log: 7; is a relay running?",
    ]


def test_a_throttled_sink_has_a_line() -> None:
    found: dict[str, Any] = {
        "relays": [],
        "sinks": {"crm": {**SINK, "in_flight_limit": 8}},
        "unrouted": [],
        "in_default_partition": 0,
    }
    assert "crm throttles: at most 8 requests at once per relay, for now" in admin.status_text(found).splitlines()


def test_status_of_an_empty_database_says_what_to_do() -> None:
    text = admin.status_text({"relays": [], "sinks": {}, "unrouted": [], "in_default_partition": 0})
    assert text.splitlines() == [
        "no sink is known yet: a relay registers its sinks when it starts",
        "",
        "no relay is alive: start one with outbox-relay run",
    ]


def test_only_sinks_over_the_limit_are_too_old() -> None:
    found = {"sinks": {"a": {**SINK, "oldest_seconds": 60.0}, "b": {**SINK, "oldest_seconds": 60.1}}}
    assert admin.too_old(found, 60) == ["sink b: its oldest event has waited for 60.1 s, more than 60 s"]
