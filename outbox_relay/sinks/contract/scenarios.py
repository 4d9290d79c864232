"""The scenarios that every sink passes, whatever its destination: see `outbox_relay.sinks.Sink`."""

from __future__ import annotations

import threading
import time

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Refused, Unavailable
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks import Sink
from outbox_relay.sinks.contract.handing import (
    PLENTY_SECONDS,
    HandOver,
    an_event,
    assert_arrived,
    assert_delivered,
    assert_prefix_per_key,
    hand_over,
    hand_over_all,
    some_events,
    unavailable,
)
from outbox_relay.sinks.contract.harness import PluginHarness, SinkHarness

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PAYLOADS = {
    "empty": b"",
    "every byte": bytes(range(256)),
    "zero": b"\x00",
    "not UTF-8": b"\xff\xfe\xc3(",
    "a megabyte": bytes(range(256)) * 4_000,
}


def assert_only_arrives(harness: SinkHarness, sink: Sink) -> None:
    """Assert that the destination receives nothing but events that are handed over now."""
    events = some_events(5)
    hand_over_all(sink, events)
    assert_arrived(harness.received(), events)


class SinkContract:
    """The suite. A test class that extends it needs a fixture ``sink_harness``."""

    def test_events_of_a_key_arrive_in_order_across_overlapping_calls(
        self, sink_harness: SinkHarness, sink: Sink
    ) -> None:
        events = some_events(600, keys=7)
        assert_delivered(hand_over(sink, events))
        received = sink_harness.received()
        assert len(received) == 600
        assert_arrived(received, events)

    @pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_a_payload_arrives_byte_for_byte(self, sink_harness: SinkHarness, sink: Sink, payload: bytes) -> None:
        assert_delivered(hand_over(sink, [an_event(payload=payload)]))
        (found,) = sink_harness.received()
        assert len(found.payload) == len(payload)
        altered = next((at for at, (a, b) in enumerate(zip(found.payload, payload, strict=True)) if a != b), None)
        assert altered is None, f"byte {altered} is not what was handed over"

    @pytest.mark.parametrize("key", [None, "", "order-1", "ключ-日本-🔑", "a b/c%\t"])
    def test_a_key_arrives_as_it_is(self, sink_harness: SinkHarness, sink: Sink, key: str | None) -> None:
        assert hand_over(sink, [an_event(key)]) == [DELIVERED]
        assert [found.key for found in sink_harness.received()] == [key]

    def test_an_event_arrives_with_its_uid_type_content_type_and_headers(
        self, sink_harness: SinkHarness, sink: Sink
    ) -> None:
        event = an_event(headers=f'{{"traceparent": "{TRACE}"}}')._replace(content_type="text/plain; charset=utf-8")
        assert hand_over(sink, [event]) == [DELIVERED]
        (found,) = sink_harness.received()
        assert (found.uid, found.type, found.content_type) == (event.uid, "order.created", "text/plain; charset=utf-8")
        assert found.headers["traceparent"] == TRACE

    def test_what_is_refused_says_why_in_its_place_and_its_neighbours_arrive_in_order(
        self, sink_harness: SinkHarness, sink: Sink
    ) -> None:
        events, poisoned = some_events(60), (0, 25, 26, 59)
        for place in poisoned:
            events[place] = sink_harness.poison(events[place])
        verdicts = hand_over(sink, events, batch=20)
        refused = {place: verdict for place, verdict in enumerate(verdicts) if isinstance(verdict, Refused)}
        assert list(refused) == list(poisoned)
        assert all(verdict.reason.isprintable() for verdict in refused.values())
        assert_delivered([verdict for place, verdict in enumerate(verdicts) if place not in poisoned])
        assert_arrived(sink_harness.received(), [event for place, event in enumerate(events) if place not in poisoned])

    def test_while_the_destination_is_down_events_are_unavailable_and_say_why(
        self, sink_harness: SinkHarness, sink: Sink
    ) -> None:
        assert_delivered(hand_over(sink, some_events(10)))
        sink_harness.break_destination()
        began = time.monotonic()
        for verdict in hand_over(sink, some_events(100), batch=20):
            assert isinstance(verdict, Unavailable)
            assert verdict.reason.isprintable()
            assert verdict.reason
        assert time.monotonic() - began < sink.timeout_seconds + 1

    def test_going_down_under_way_leaves_a_prefix_of_every_key(self, sink_harness: SinkHarness, sink: Sink) -> None:
        events = some_events(400)
        under_way = HandOver(sink, events, batch=20)
        under_way.begin()
        sink_harness.break_destination()
        verdicts = under_way.end()
        assert_prefix_per_key(events, verdicts)
        sink_harness.mend_destination()
        hand_over_all(sink, unavailable(events, verdicts))
        assert_arrived(sink_harness.received(), events)

    def test_nothing_is_handed_over_after_until(self, sink_harness: SinkHarness, sink: Sink) -> None:
        verdicts = hand_over(sink, some_events(30), until=lease_clock(), batch=10)
        assert all(isinstance(verdict, Unavailable) for verdict in verdicts)
        after = some_events(5)
        assert_delivered(hand_over(sink, after))
        assert_arrived(sink_harness.received(), after)

    def test_withdrawn_calls_do_not_come_back_and_are_not_sent(self, sink_harness: SinkHarness, sink: Sink) -> None:
        sink_harness.break_destination()
        HandOver(sink, some_events(50), batch=10).begin()
        sink.withdraw()
        assert not sink.completed(0.0)
        sink_harness.mend_destination()
        assert_only_arrives(sink_harness, sink)

    def test_a_wake_ends_the_wait_for_completions(self, sink: Sink) -> None:
        began = time.monotonic()
        threading.Timer(0.05, sink.wake).start()
        assert not sink.completed(PLENTY_SECONDS)
        assert time.monotonic() - began < PLENTY_SECONDS

    def test_a_sink_opens_again_after_it_was_closed(self, sink_harness: SinkHarness, sink: Sink) -> None:
        before, after = some_events(5), some_events(5)
        assert_delivered(hand_over(sink, before))
        sink.close()
        sink.open()
        assert_delivered(hand_over(sink, after))
        assert_arrived(sink_harness.received(), [*before, *after])

    def test_a_sink_opens_while_its_destination_is_down(self, sink_harness: SinkHarness) -> None:
        sink_harness.break_destination()
        sink = sink_harness.make_sink()
        sink.open()
        sink_harness.mend_destination()
        events = some_events(5)
        hand_over_all(sink, events)
        sink.close()
        assert_arrived(sink_harness.received(), events)

    def test_a_destination_that_is_up_passes_the_check(self, sink_harness: SinkHarness, sink: Sink) -> None:
        assert sink.check() is None
        assert_only_arrives(sink_harness, sink)


class PluginContract(SinkContract):
    """The suite for a plug-in, whose ``sink_harness`` is a ``PluginHarness``."""

    def test_a_setting_that_the_model_does_not_have_is_refused(self, sink_harness: PluginHarness) -> None:
        table = {"type": sink_harness.type, **sink_harness.settings(), "no_such_setting_of_a_sink": 1}
        with pytest.raises(ValueError, match="no_such_setting_of_a_sink"):
            sink_harness.found().settings.model_validate(table)

    def test_a_replay_delivers_events_again(self, sink_harness: PluginHarness, sink: Sink) -> None:
        events = some_events(5)
        assert_delivered(hand_over(sink, events))
        client = sink_harness.make_sink(replay=7)
        client.open()
        try:
            assert_delivered(hand_over(client, events))
        finally:
            client.close()
        received = [found.uid for found in sink_harness.received()]
        assert sorted(received) == sorted(event.uid for event in [*events, *events])
