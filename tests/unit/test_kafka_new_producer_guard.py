"""What may go out on a new producer before the record ahead of it in its key is acknowledged."""

from collections.abc import Sequence

from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard
from tests.contract.harness import an_event


def a_call(*records: tuple[str | None, str | None]) -> DeliverCall:
    """A call with records of these topics and keys."""
    batch = [an_event(key) for _, key in records]
    call = DeliverCall(
        1, batch, 0.0, 0.0, DeliveryRound(), lambda _: None, DeliveryReports(len(batch)), range(len(batch))
    )
    call.topics = [topic for topic, _ in records]
    return call


def given(opening: NewProducerGuard, call: DeliverCall, places: Sequence[int] | None = None) -> list[int]:
    """Hand over what may go out now, of `places`."""
    fitting = list(opening.fitting(call, range(len(call.batch)) if places is None else places))
    opening.sent(call, fitting)
    return fitting


def test_a_second_record_of_a_key_waits_for_the_first_and_others_do_not() -> None:
    call = a_call(("t", "a"), ("t", None), ("t", "b"), ("t", None), ("t", "a"), ("t", "c"), ("t", "b"), ("t", "a"))
    opening = NewProducerGuard()
    assert given(opening, call) == [0, 1, 2, 3]
    assert given(opening, call, range(4, 8)) == []
    opening.acknowledged(lambda _: 9)
    assert given(opening, call, range(4, 8)) == [4, 5, 6, 7], "keys that were acknowledged flow"
    assert not opening.over(call, range(8))


def test_a_topic_is_known_once_a_record_was_acknowledged_in_each_of_its_partitions() -> None:
    call = a_call(("t", "a"), ("t", "b"), ("u", "a"), ("u", "a"), ("t", "c"), ("t", "c"))
    opening = NewProducerGuard()
    assert given(opening, call) == [0, 1, 2]
    opening.partitions.update([("t", 0), ("t", 1), ("u", 0)])
    opening.acknowledged({"t": 2, "u": 2}.__getitem__)
    assert opening.over(call, [0, 1, 4, 5])
    assert not opening.over(call, [2])
    assert given(opening, call, [3, 4, 5, 5]) == [3, 4, 5, 5]


def test_what_was_not_handed_over_is_not_acknowledged() -> None:
    call = a_call(("t", "a"), ("t", "b"), ("t", "b"))
    opening = NewProducerGuard()
    assert list(opening.fitting(call, [0, 1])) == [0, 1]
    opening.sent(call, [0])
    opening.acknowledged(lambda _: 9)
    assert given(opening, call, [1, 2]) == [1]


def test_refused_records_have_no_topic_and_wait_for_nothing() -> None:
    call = a_call((None, "a"), (None, "a"))
    assert NewProducerGuard().over(call, [0, 1])
