"""Topics in trouble are probed at growing distances, and their events come back spread over time."""

import pytest

from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers


@pytest.fixture
def troubles() -> TopicBreakers:
    found = TopicBreakers(noise=lambda: 0.5)
    found.note("t", "topic t: gone", now=100.0)
    return found


def test_probes_are_one_second_apart_then_twice_as_long_up_to_a_minute(troubles: TopicBreakers) -> None:
    now, distances = 100.0, list[float]()
    for _ in range(9):
        verdict = troubles.verdict("t", now)
        distance = next(n for n in range(1, 100) if troubles.due("t", now + n))
        assert not troubles.due("t", now + distance - 0.01)
        assert verdict.retry_after_seconds is not None
        assert verdict.retry_after_seconds > distance
        now += distance
        distances.append(distance)
        assert troubles.probe("t", now)
        troubles.note("t", "still gone", now)
    assert distances == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_probe_is_under_way_at_once(troubles: TopicBreakers) -> None:
    assert not troubles.probe("t", 100.5)
    assert troubles.probe("t", 101.0)
    assert not troubles.probe("t", 101.0)
    troubles.unused("t")
    assert troubles.probe("t", 101.0)


def test_what_was_sent_before_the_trouble_was_known_makes_no_distance_longer(troubles: TopicBreakers) -> None:
    troubles.note("t", "gone", 100.1)
    assert troubles.due("t", 101.2)


def test_a_topic_that_takes_an_event_is_in_no_trouble(troubles: TopicBreakers) -> None:
    assert "t" in troubles
    troubles.mended("t")
    assert "t" not in troubles
    assert troubles.due("t", 100.0)
    assert not troubles.probe("t", 100.0)


def test_the_verdict_names_the_topic_and_why(troubles: TopicBreakers) -> None:
    verdict = troubles.verdict("t", 100.0)
    assert (verdict.part, verdict.reason) == ("topic t", "topic t: gone")


def test_events_come_back_spread_over_the_distance_of_probes() -> None:
    draws = iter(n / 1000 for n in range(1000))
    troubles = TopicBreakers(noise=lambda: next(draws))
    troubles.note("t", "gone", 0.0)
    waits = [troubles.verdict("t", 0.0).retry_after_seconds or 0.0 for _ in range(1000)]
    assert min(waits) > 1.0
    assert max(waits) - min(waits) > 0.9


def test_the_number_of_topics_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.sinks.kafka.topic_breakers.TOPICS", 3)
    troubles = TopicBreakers()
    for number in range(10):
        troubles.note(f"t{number}", "gone", 0.0)
    assert len(troubles) == 3
