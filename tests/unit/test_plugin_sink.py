"""The sink of a plug-in: calls that raise, answer nonsense, never end, or repeat what must not be repeated."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from pydantic import SecretStr

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks import Call, PluginSettings, SinkContext
from outbox_relay.sinks.contract.handing import an_event, hand_over, some_events, soon
from outbox_relay.sinks.plugin import PluginSink
from tests.support.wait import until

CANARY = "canary-7f3a91"
SECONDS = 20
Deliver = Callable[[Sequence[StoredEvent]], Any]


class OwnSettings(PluginSettings):
    """Settings with secrets."""

    token: SecretStr = SecretStr(CANARY)
    note: str = f"note-{CANARY}"


class OddPlugin:
    """A plug-in whose class has the function that it delivers with."""

    API_VERSION = 1
    Settings = OwnSettings
    keeps_order = True
    max_batch = 100
    max_in_flight = 4
    act: Deliver

    def __init__(self, _settings: OwnSettings, context: SinkContext) -> None:
        self.context = context

    def deliver(self, events: Sequence[StoredEvent], _deadline: float, /) -> Sequence[Verdict]:
        return type(self).act(events)


def plugin(act: Deliver, **members: Any) -> type[OddPlugin]:
    """Return a class of plug-ins."""
    return type("TestedPlugin", (OddPlugin,), {"act": staticmethod(act), **members})


def delivered(events: Sequence[StoredEvent]) -> list[Verdict]:
    return [DELIVERED for _ in events]


@contextmanager
def opened(kind: type[OddPlugin], context: SinkContext | None = None, **table: Any) -> Generator[PluginSink]:
    """Yield an open sink with a plug-in of the class `kind`."""
    settings = OwnSettings.model_validate({"type": "odd", **table})
    sink = PluginSink(cast("Any", kind), settings, context or SinkContext("crm"))
    sink.open()
    yield sink
    sink.close()


def deliver(sink: PluginSink, *events: StoredEvent) -> Sequence[Verdict]:
    """Return the verdicts of one call."""
    sink.submit(call := Call(events, soon()))
    until(lambda: call in sink.completed(1.0), seconds=SECONDS, what="the call ends")
    return [DELIVERED] * len(events) if call.verdicts is None else call.verdicts


def leave(_events: Sequence[StoredEvent]) -> None:
    sys.exit(CANARY)


def repeat(events: Sequence[StoredEvent]) -> None:
    raise ValueError(events[0].payload)


NONSENSE: dict[str, tuple[Deliver, str]] = {
    "raises": (repeat, "raised ValueError at unit/test_plugin_sink.py:"),
    "exits": (leave, "raised SystemExit at unit/test_plugin_sink.py:"),
    "none": (lambda _: None, "raised TypeError"),
    "too few": (lambda _: [], "did not return a verdict for each event"),
    "no verdict": (lambda events: [True for _ in events], "did not return a verdict for each event"),
}


@pytest.mark.parametrize(("act", "message"), NONSENSE.values(), ids=NONSENSE.keys())
def test_a_call_without_verdicts_is_a_failure_of_its_event_and_the_next_one_is_delivered(
    act: Deliver, message: str
) -> None:
    kind = plugin(act)
    with opened(kind) as sink:
        [verdict] = deliver(sink, an_event(payload=CANARY.encode()))
        assert isinstance(verdict, Failed)
        assert message in verdict.reason
        assert verdict.attempt is not None
        assert verdict.attempt.code == "plugin_error"
        assert CANARY not in repr(verdict)
        kind.act = staticmethod(delivered)
        assert deliver(sink, an_event()) == [DELIVERED]


@pytest.mark.fence("a plug-in raises, blocks, or answers nonsense")
def test_a_call_with_several_events_that_has_no_verdicts_counts_for_none_of_them() -> None:
    """Goes red when such a call makes each of its events an attempt: the relay then looks for the one by itself."""
    with opened(plugin(repeat)) as sink:
        verdicts = deliver(sink, *some_events(3))
        assert all(isinstance(verdict, Unavailable) and not verdict.behind for verdict in verdicts)
        assert len(verdicts) == 3


def test_a_call_that_does_not_end_fails_and_others_are_made_beside_it() -> None:
    release = threading.Event()
    kind = plugin(lambda _: release.wait(SECONDS) and None, keeps_order=False, max_batch=1)
    with opened(kind, timeout_seconds=0.2) as sink:
        [verdict] = deliver(sink, an_event())
        assert isinstance(verdict, Failed)
        assert verdict.reason == "the plug-in did not answer within 0.2 s"
        assert (sink.hanging, sink.fault) == (1, None)
        assert sink.trouble == "1 of 4 calls have not ended in time, and cannot be ended"
        kind.act = staticmethod(delivered)
        assert deliver(sink, an_event()) == [DELIVERED]
        release.set()
        until(lambda: not (sink.completed(0.1) or sink.hanging), seconds=SECONDS, what="the call ends")
        assert sink.trouble is None


def test_a_plugin_that_cannot_be_opened_makes_events_wait_and_is_opened_again() -> None:
    failing = True

    def open_it(_self: object) -> None:
        if failing:
            raise OSError(CANARY)

    with opened(plugin(delivered, open=open_it)) as sink:
        [verdict] = deliver(sink, an_event())
        assert isinstance(verdict, Unavailable)
        assert "cannot be opened: OSError at " in verdict.reason
        assert CANARY not in verdict.reason
        failing = False
        assert deliver(sink, an_event()) == [DELIVERED]


def test_a_plugin_that_takes_long_to_open_is_given_no_event_late_and_no_attempt_counts() -> None:
    """Goes red when an unreachable destination uses up attempts, or events are passed after the end of their call."""
    release, got = threading.Event(), list[StoredEvent]()

    def note(events: Sequence[StoredEvent]) -> list[Verdict]:
        got.extend(events)
        return delivered(events)

    def open_slowly(_self: object) -> None:
        release.wait(SECONDS)

    kind = plugin(note, open=open_slowly, keeps_order=False)
    with opened(kind, timeout_seconds=0.2) as sink:
        assert deliver(sink, an_event()) == [Unavailable("the plug-in is still being opened")]
        release.set()
        until(lambda: not (sink.completed(0.1) or sink.hanging), seconds=SECONDS, what="the call ends")
        assert not got
        assert deliver(sink, last := an_event()) == [DELIVERED]
        assert got == [last]


CHECKS = {
    "nothing": (lambda: None, None),
    "text": (lambda: "no stream", "no stream"),
    "raises": (lambda: 1 / 0, "the plug-in raised ZeroDivisionError at unit/test_plugin_sink.py:"),
}


@pytest.mark.parametrize(("answer", "found"), CHECKS.values(), ids=CHECKS.keys())
def test_a_check_says_what_the_plugin_finds(answer: Callable[[], Any], found: str | None) -> None:
    def check(_self: object) -> Any:
        return answer()

    with opened(plugin(delivered, check=check)) as sink:
        assert (sink.check() or "").startswith(found or "")
        assert (sink.check() is None) == (found is None)


def test_one_call_at_a_time_keeps_the_order() -> None:
    got = list[int]()

    def note(events: Sequence[StoredEvent]) -> list[Verdict]:
        got.extend(event.id for event in events)
        return delivered(events)

    events = some_events(500)
    with opened(plugin(note)) as sink:
        assert (sink.keeps_order, sink.max_batch, sink.max_in_flight) == (True, 100, 1)
        hand_over(sink, events)
    assert got == [event.id for event in events]


def test_a_sink_that_holds_keys_gets_one_event_at_a_time() -> None:
    with opened(plugin(delivered), when_dead="hold") as sink:
        assert (sink.keeps_order, sink.max_batch, sink.max_in_flight) == (False, 1, 4)
    with opened(plugin(delivered, keeps_order=False), SinkContext("crm", 7, 2)) as sink:
        assert (sink.keeps_order, sink.max_batch, sink.max_in_flight) == (False, 1, 2)


@pytest.mark.fence("a plug-in delivers past an undelivered event of a key")
def test_nothing_counts_as_delivered_behind_an_undelivered_event_of_its_key() -> None:
    """Goes red when the last event that arrives of a key is an older one, since a plug-in delivers past a failure."""
    events = [an_event(key) for key in ("a", "b", "a", None, "b", "c")]
    answer: list[Verdict] = [Failed("x"), Refused("y"), DELIVERED, Unavailable("z"), DELIVERED, DELIVERED]
    with opened(plugin(lambda _: answer)) as sink:
        kinds = [type(verdict) for verdict in deliver(sink, *events)]
    assert kinds == [Failed, Refused, Unavailable, Unavailable, Delivered, Delivered]
