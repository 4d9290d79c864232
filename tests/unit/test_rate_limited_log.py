"""A recurring warning is written seldom, and another one is not hidden by it."""

import pytest

from outbox_relay.domain.log_events import MOST_LINES, RateLimitedLog
from tests.support.logs import RecordedLog


def test_a_second_cause_is_written_at_once() -> None:
    log = RecordedLog()
    limited = RateLimitedLog(log)
    for cause in ("connection_lost", "connection_lost", "lease_lost", None, "lease_lost"):
        limited.warning("sink.restarted", sink="crm", cause=cause)
    assert [values["cause"] for _, values in log.warnings] == ["connection_lost", "lease_lost", None]


@pytest.mark.parametrize("subject", ["sink", "part", "chore", "schedule", "group", "replay"])
def test_a_part_that_fails_does_not_hide_another_one(subject: str) -> None:
    log = RecordedLog()
    limited = RateLimitedLog(log)
    for name in ("a", "b", "a"):
        limited.warning("figures.failed", **{subject: name})
    assert [values[subject] for _, values in log.warnings] == ["a", "b"]


def test_the_number_of_lines_that_are_told_apart_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.domain.log_events.MOST_LINES", 3)
    log = RecordedLog()
    limited = RateLimitedLog(log)
    for number in range(20):
        limited.warning("sink.restarted", cause=f"cause {number}")
    assert [values["cause"] for _, values in log.warnings] == ["cause 0", "cause 1", "cause 2", "cause 3"]
    assert MOST_LINES < 10_000
