"""The records that a new producer may send before earlier ones of their keys are acknowledged."""

from collections.abc import Sequence

from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard


def a_call(*records: tuple[str | None, str | None]) -> DeliverCall:
    """Return a call with records of these topics and keys."""
    batch = [an_event(key) for _, key in records]
    call = DeliverCall(1, batch, 0.0, 0.0, DeliveryRound(), lambda _: None, DeliveryReports(len(batch)))
    call.set_topics([topic for topic, _ in records])
    return call


def given(guard: NewProducerGuard, call: DeliverCall, indexes: Sequence[int] | None = None) -> list[int]:
    """Hand over the records that may be sent now, of `indexes`."""
    sendable = list(guard.sendable(call, range(len(call.batch)) if indexes is None else indexes))
    guard.record_sent(call, sendable)
    return sendable


def test_a_second_record_of_a_key_waits_for_the_first_and_others_do_not() -> None:
    call = a_call(("t", "a"), ("t", None), ("t", "b"), ("t", None), ("t", "a"), ("t", "c"), ("t", "b"), ("t", "a"))
    guard = NewProducerGuard()
    assert given(guard, call) == [0, 1, 2, 3]
    assert given(guard, call, range(4, 8)) == []
    guard.record_acknowledged(lambda _: 9)
    assert given(guard, call, range(4, 8)) == [4, 5, 6, 7], "acknowledged keys do not wait"
    assert not guard.is_open(call, range(8))


def test_a_topic_is_open_once_each_of_its_partitions_has_an_acknowledged_record() -> None:
    call = a_call(("t", "a"), ("t", "b"), ("u", "a"), ("u", "a"), ("t", "c"), ("t", "c"))
    guard = NewProducerGuard()
    assert given(guard, call) == [0, 1, 2]
    guard.partitions.update([("t", 0), ("t", 1), ("u", 0)])
    guard.record_acknowledged({"t": 2, "u": 2}.__getitem__)
    assert guard.is_open(call, [0, 1, 4, 5])
    assert not guard.is_open(call, [2])
    assert given(guard, call, [3, 4, 5, 5]) == [3, 4, 5, 5]


def test_records_not_handed_over_are_not_acknowledged() -> None:
    call = a_call(("t", "a"), ("t", "b"), ("t", "b"))
    guard = NewProducerGuard()
    assert list(guard.sendable(call, [0, 1])) == [0, 1]
    guard.record_sent(call, [0])
    guard.record_acknowledged(lambda _: 9)
    assert given(guard, call, [1, 2]) == [1]


def test_refused_records_have_no_topic_and_do_not_wait() -> None:
    call = a_call((None, "a"), (None, "a"))
    assert NewProducerGuard().is_open(call, [0, 1])
