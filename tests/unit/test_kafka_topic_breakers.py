"""Circuit breakers of topics: growing probe intervals, and retries spread over time."""

import pytest

from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers


@pytest.fixture
def breakers() -> TopicBreakers:
    found = TopicBreakers()
    found.open("t", "topic t: gone", now=100.0)
    return found


def test_the_probe_interval_doubles_from_a_second_to_a_minute(breakers: TopicBreakers) -> None:
    now, distances = 100.0, list[float]()
    for _ in range(9):
        verdict = breakers.verdict("t", now)
        distance = next(n for n in range(1, 100) if breakers.may_request("t", now + n))
        assert not breakers.may_request("t", now + distance - 0.01)
        assert verdict.retry_after_seconds is not None
        assert verdict.retry_after_seconds > distance
        now += distance
        distances.append(distance)
        assert breakers.begin_probe("t", now)
        breakers.open("t", "still gone", now)
    assert distances == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_probe_is_in_flight_at_once(breakers: TopicBreakers) -> None:
    assert not breakers.begin_probe("t", 100.5)
    assert breakers.begin_probe("t", 101.0)
    assert not breakers.begin_probe("t", 101.0)
    breakers.cancel_probe("t")
    assert breakers.begin_probe("t", 101.0)


def test_records_sent_before_the_breaker_opened_do_not_lengthen_the_interval(breakers: TopicBreakers) -> None:
    breakers.open("t", "gone", 100.1)
    assert breakers.may_request("t", 101.2)


def test_a_delivered_event_closes_the_breaker(breakers: TopicBreakers) -> None:
    assert "t" in breakers
    breakers.close("t")
    assert "t" not in breakers
    assert breakers.may_request("t", 100.0)
    assert not breakers.begin_probe("t", 100.0)


def test_the_verdict_has_the_topic_and_the_reason(breakers: TopicBreakers) -> None:
    verdict = breakers.verdict("t", 100.0)
    assert (verdict.part, verdict.reason) == ("topic t", "topic t: gone")


def test_retries_are_spread_over_the_probe_interval() -> None:
    breakers = TopicBreakers()
    breakers.open("t", "gone", 0.0)
    waits = [breakers.verdict("t", 0.0).retry_after_seconds or 0.0 for _ in range(1000)]
    assert min(waits) > 1.0
    assert max(waits) - min(waits) > 0.9


def test_the_number_of_breakers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.topic_breakers.MAX_BREAKERS", 3)
    breakers = TopicBreakers()
    for number in range(10):
        breakers.open(f"t{number}", "gone", 0.0)
    assert len(breakers) == 3
