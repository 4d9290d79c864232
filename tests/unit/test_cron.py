"""Times of cron expressions: changes of the clock both ways, missed times, and expressions that are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outbox_relay.domain.cron import TIMES_MAX, Firing, cron_fault, firing, next_time, zone_fault

BERLIN = "Europe/Berlin"
"""Forward at 2026-03-29 01:00 UTC, from 02:00 to 03:00, and back at 2026-10-25 01:00 UTC, from 03:00 to 02:00."""


def at(text: str) -> datetime:
    """Return a time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(cron: str, zone: str, after: str, count: int) -> list[str]:
    """Return the next times, each found from the one before, as relays find them."""
    found = [at(after)]
    for _ in range(count):
        following = next_time(cron, zone, found[-1])
        assert following is not None
        found.append(following)
    return [f"{time:%m-%d %H:%M}" for time in found[1:]]


def test_a_time_that_is_skipped_in_spring_comes_once_when_the_clock_is_set_forward() -> None:
    assert times("30 2 * * *", BERLIN, "2026-03-27 12:00", 3) == ["03-28 01:30", "03-29 01:00", "03-30 00:30"]


def test_a_time_that_is_repeated_in_autumn_comes_the_first_time_only() -> None:
    assert times("30 2 * * *", BERLIN, "2026-10-24 12:00", 2) == ["10-25 00:30", "10-26 01:30"]


def test_every_half_hour_goes_on_through_both_changes() -> None:
    assert times("*/30 * * * *", BERLIN, "2026-03-29 00:00", 3) == ["03-29 00:30", "03-29 01:00", "03-29 01:30"]
    assert times("*/30 * * * *", BERLIN, "2026-10-25 00:00", 4) == [
        *("10-25 00:30", "10-25 01:00"),
        *("10-25 01:30", "10-25 02:00"),
    ]


@pytest.mark.parametrize("minute", [0, 10, 20, 40, 59])
def test_no_time_comes_that_has_passed_in_the_repeated_hour(minute: int) -> None:
    after = at("2026-10-25 01:00") + timedelta(minutes=minute)
    following = next_time("*/15 2 * * *", BERLIN, after)
    assert following is not None
    assert following > after
    fixed = next_time("5,35 2 * * *", BERLIN, after)
    assert fixed == at("2026-10-26 01:05")


def test_one_event_for_all_missed_times() -> None:
    due = at("2026-01-01 03:00")
    found = firing("0 * * * *", "UTC", "one", due, at("2026-01-01 07:30"))
    assert found == Firing([at("2026-01-01 07:00")], at("2026-01-01 08:00"))


@pytest.mark.parametrize("missed", ["one", "skip"])
def test_a_time_that_is_not_yet_late_by_a_minute_is_not_missed(missed: str) -> None:
    found = firing("* * * * *", "UTC", missed, at("2026-01-01 03:00"), at("2026-01-01 07:30:30"))
    assert found is not None
    assert found.times == ([at("2026-01-01 07:29")] if missed == "one" else [])
    assert found.next == at("2026-01-01 07:30")


def test_all_missed_times_in_portions() -> None:
    due, now = at("2026-01-01 00:00"), at("2026-01-01 20:00:30")
    first = firing("* * * * *", "UTC", "all", due, now)
    assert first is not None
    assert first.times is not None
    assert len(first.times) == TIMES_MAX
    assert (first.times[0], first.next) == (due, first.times[-1] + timedelta(minutes=1))
    second = firing("* * * * *", "UTC", "all", first.next, now)
    assert second is not None
    assert second.times is not None
    assert (second.times[-1], second.next) == (at("2026-01-01 20:00"), at("2026-01-01 20:01"))
    assert len({*first.times, *second.times}) == 20 * 60 + 1


@pytest.mark.parametrize("cron", ["0 0 29 2 *", "* * 1 1 *", "*/5 * * * *", "30 2 * * *", "0 0 * * MON#5"])
def test_the_newest_missed_time_is_the_one_before_the_next(cron: str) -> None:
    due, now = next_time(cron, BERLIN, at("2020-01-01 00:00")), at("2026-11-25 12:00:30")
    assert due is not None
    found = firing(cron, BERLIN, "one", due, now)
    assert found is not None
    assert found.times is not None
    [newest] = found.times
    assert newest < now - timedelta(minutes=1) <= found.next
    assert next_time(cron, BERLIN, newest) == found.next


@pytest.mark.parametrize(
    "cron",
    [
        *("", "* * * *", "* * * * * *", "@daily", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * 8"),
        *("*/0 * * * *", "5-1 * * * *", "a b c d e", "\0 * * * *", "²L * * * *", "* * * * ²L", "LW/3 * * * *"),
        *("1,,2 * * * *", "* * * * MON#6", "- * * * *", "/ * * * *", "# * * * *", "* * * * L"),
    ],
)
def test_what_is_no_expression_is_refused(cron: str) -> None:
    assert cron_fault(cron) is not None


@pytest.mark.parametrize("cron", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 31 2 *"])
def test_an_expression_that_never_comes_is_refused(cron: str) -> None:
    assert cron_fault(cron) == "the day-of-month is not valid, or never comes"


@pytest.mark.parametrize(
    "name",
    ["", "America", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 65, "x" * 60, "Mars", "localtime", "right/UTC"],
)
def test_what_is_no_time_zone_is_refused(name: str) -> None:
    assert zone_fault(name) is not None


def test_the_nearest_time_zone_is_named() -> None:
    assert zone_fault("europe/berlin") == "there is no such time zone; did you mean Europe/Berlin?"
    for name in ("localtime", "Factory", "right/UTC"):
        assert str(zone_fault(name)).startswith("is not the same on every machine")
    assert "localtime" not in str(zone_fault("localtme"))
    assert zone_fault(BERLIN) is None


@pytest.mark.parametrize("cron", ["0 0 29 2 *", "0 0 1 1 *", "* * * * *"])
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
def test_no_time_comes_after_the_last_year(cron: str, zone: str) -> None:
    """A clock that is wrong must not end the relay."""
    for after in (datetime(9998, 12, 31, 23, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)):
        try:
            found = next_time(cron, zone, after)
        except ValueError:
            continue
        assert found is None or found > after
