"""The guard around plug-ins: they raise, answer nonsense, never end, block their thread, and leave."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from pydantic import SecretStr

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks import PluginSettings, SinkContext
from outbox_relay.sinks.contract.handing import an_event, some_events, soon
from outbox_relay.sinks.plugin import PluginSink
from outbox_relay.sinks.plugin.answers import in_order, read_verdicts
from tests.support.wait import becomes

CANARY = "canary-7f3a91"
QUICK: dict[str, Any] = {"timeout_seconds": 0.2}


class OwnSettings(PluginSettings):
    """Settings with secrets."""

    token: SecretStr = SecretStr(CANARY)
    note: str = f"note-{CANARY}"


class OddPlugin:
    """A plug-in that does what `deliver` is set to; of every new object."""

    API_VERSION = 1
    Settings = OwnSettings
    keeps_order = True
    max_batch = 100
    max_in_flight = 4
    act: Callable[[Sequence[StoredEvent]], Any]

    def __init__(self, _settings: OwnSettings, context: SinkContext) -> None:
        self.context = context
        self.thread: int | None = None

    async def open(self) -> None: ...

    async def deliver(self, batch: Sequence[StoredEvent], _until: float, _attempt: int, /) -> Sequence[Verdict]:
        self.thread = threading.get_ident()
        answer = type(self).act(batch)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def reset(self) -> None: ...

    async def check(self) -> str | None:
        return None

    async def close(self) -> None: ...


def plugin(act: Callable[[Sequence[StoredEvent]], Any], **members: Any) -> type[OddPlugin]:
    """Return a class of plug-ins."""
    return type("TestedPlugin", (OddPlugin,), {"act": staticmethod(act), **members})


def delivered(batch: Sequence[StoredEvent]) -> list[Verdict]:
    return [DELIVERED for _ in batch]


@asynccontextmanager
async def opened(kind: type[OddPlugin], context: SinkContext | None = None, **table: Any) -> AsyncGenerator[PluginSink]:
    """Return an open sink around a plug-in of the class `kind`."""
    settings = OwnSettings.model_validate({"type": "odd", **table})
    sink = PluginSink(cast("Any", kind), settings, context or SinkContext("crm"))
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


def leave(_batch: Sequence[StoredEvent]) -> None:
    sys.exit(CANARY)


def repeat(batch: Sequence[StoredEvent]) -> None:
    raise ValueError(batch[0].payload)


async def leave_in_a_task(_batch: Sequence[StoredEvent]) -> None:
    async def go() -> None:
        sys.exit(0)

    left = asyncio.ensure_future(go())
    await asyncio.sleep(0)
    await asyncio.wait([left])
    left.exception()
    raise ValueError(CANARY)


async def cancel_itself(_batch: Sequence[StoredEvent]) -> None:
    raise asyncio.CancelledError


NONSENSE: dict[str, tuple[Callable[[Sequence[StoredEvent]], Any], str]] = {
    "raises": (repeat, "raised ValueError at unit/test_plugin_sink.py:"),
    "exits": (leave, "raised SystemExit at unit/test_plugin_sink.py:"),
    "exits in a task": (leave_in_a_task, "raised ValueError at "),
    "cancelled": (cancel_itself, "raised CancelledError at "),
    "none": (lambda _: None, "returned None in place of a list of verdicts"),
    "text": (lambda _: CANARY, "returned a value of the class str in place of a list of verdicts"),
    "too few": (lambda _: [], "returned 0 verdicts for 1 event"),
    "too many": (lambda _: [DELIVERED] * 3, "returned 3 verdicts for 1 event"),
    "no verdict": (lambda batch: [True for _ in batch], "returned a value of the class bool in place of a verdict"),
    "a class": (lambda batch: [Delivered for _ in batch], "returned a value of the class type in place of a verdict"),
    "no reason": (lambda batch: [Failed(cast("Any", None)) for _ in batch], "in place of a verdict"),
}


@pytest.mark.parametrize(("act", "said"), NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_call_without_verdicts_is_a_failure_of_its_event_and_the_next_one_is_delivered(
    act: Callable[[Sequence[StoredEvent]], Any], said: str
) -> None:
    kind = plugin(act)
    async with opened(kind) as sink:
        [verdict] = await sink.deliver([an_event(payload=CANARY.encode())], soon())
        assert isinstance(verdict, Failed)
        assert said in verdict.reason
        assert verdict.attempt is not None
        assert verdict.attempt.code == "plugin_error"
        assert CANARY not in repr(verdict)
        kind.act = staticmethod(delivered)
        assert await sink.deliver([an_event()], soon()) == [DELIVERED]


async def test_a_call_with_several_events_that_has_no_verdicts_counts_for_none_of_them() -> None:
    """Goes red when such a call makes each of its events an attempt: the relay then looks for the one by itself."""
    async with opened(plugin(repeat)) as sink:
        verdicts = await sink.deliver(some_events(3), soon())
        assert all(isinstance(verdict, Unavailable) and not verdict.behind for verdict in verdicts)
        assert len(verdicts) == 3


async def test_a_call_that_does_not_end_is_cancelled_and_counts() -> None:
    async with opened(plugin(lambda _: asyncio.sleep(60)), **QUICK) as sink:
        began = time.monotonic()
        [verdict] = await sink.deliver([an_event()], soon())
        assert isinstance(verdict, Failed)
        assert verdict.reason == "the plug-in did not answer within 0.2 s"
        assert time.monotonic() - began < 1.5
        assert sink.trouble is None


async def test_while_a_call_refuses_to_end_nothing_is_sent_and_then_events_flow_again() -> None:
    """Goes red when a call that was given up does not keep others back: it would run beside its repetition."""
    release, calls = threading.Event(), list[str]()

    async def stay(batch: Sequence[StoredEvent]) -> list[Verdict]:
        calls.append(batch[0].uid)
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return delivered(batch)

    async with opened(plugin(stay), **QUICK) as sink:
        event = an_event()
        [verdict] = await sink.deliver([event], soon())
        assert isinstance(verdict, Failed)
        [again] = await sink.deliver([event], soon())
        assert isinstance(again, Unavailable)
        assert "does not end a call that began" in again.reason
        assert sink.trouble == again.reason
        assert calls == [event.uid]
        release.set()
        await becomes(lambda: sink.trouble is None, "the call ends")
        assert await sink.deliver([event], soon()) == [DELIVERED]


async def test_a_plugin_that_blocks_its_thread_delays_no_other_part_and_fails_the_event_that_blocks() -> None:
    """Goes red when plug-ins run in the event loop of the relay."""
    release = threading.Event()
    kind = plugin(lambda _: release.wait(30) and None, keeps_order=False, max_batch=1)
    async with opened(kind, **QUICK) as sink:
        blocking = asyncio.ensure_future(sink.deliver([an_event("a")], soon()))
        await becomes(lambda: sink_thread_is_busy(sink), "the call blocks")
        waiting = asyncio.ensure_future(sink.deliver([an_event("b")], soon()))
        began, turns = time.monotonic(), 0
        while not (blocking.done() and waiting.done()):
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 10 * (time.monotonic() - began)
        [guilty], [bystander] = blocking.result(), waiting.result()
        assert isinstance(guilty, Failed)
        assert isinstance(bystander, Unavailable)
        assert bystander.behind
        kind.act = staticmethod(delivered)
        release.set()
        await becomes(lambda: sink.trouble is None, "the thread is free")
        assert await sink.deliver([an_event()], soon()) == [DELIVERED]


def sink_thread_is_busy(sink: PluginSink) -> bool:
    """Return True if one of the calls of the sink is being executed."""
    calls: Any = sink.__dict__["_calls"]
    return any(call.runs_now for call in calls)


async def test_a_blocked_plugin_is_closed_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox_relay.sinks.plugin import loop_thread
    from outbox_relay.sinks.plugin import sink as module

    for limit in ("CANCEL_SECONDS", "CLOSE_SECONDS", "RESET_SECONDS"):
        monkeypatch.setattr(module, limit, 0.1)
    monkeypatch.setattr(loop_thread, "STOP_SECONDS", 0.1)
    release = threading.Event()
    async with opened(plugin(lambda _: release.wait(30) and None), **QUICK) as sink:
        await sink.deliver([an_event()], soon())
        began = time.monotonic()
        await sink.reset()
        await sink.close()
        assert time.monotonic() - began < 3
        [verdict] = await sink.deliver([an_event()], soon())
        assert isinstance(verdict, Unavailable)
        release.set()


async def test_calls_that_a_reset_ends_are_unavailable() -> None:
    async with opened(plugin(lambda _: asyncio.sleep(60))) as sink:
        calls = [asyncio.ensure_future(sink.deliver([an_event()], soon())) for _ in range(3)]
        await becomes(lambda: len(sink.__dict__["_calls"]) == 3, "the calls are under way")
        await sink.reset()
        for call in calls:
            assert await call == [Unavailable("the sink was reset")]


async def test_a_call_that_the_relay_gives_up_is_cancelled_in_its_thread() -> None:
    ended = threading.Event()

    async def stay(_batch: Sequence[StoredEvent]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with opened(plugin(stay)) as sink:
        call = asyncio.ensure_future(sink.deliver([an_event()], soon()))
        await becomes(lambda: sink_has_tasks(sink), "the call is under way")
        call.cancel()
        await becomes(ended.is_set, "the call is cancelled")


def sink_has_tasks(sink: PluginSink) -> bool:
    calls: Any = sink.__dict__["_calls"]
    return any(call.__dict__["_task"] is not None for call in calls)


async def test_a_plugin_that_cannot_be_opened_makes_events_wait_and_is_opened_again() -> None:
    failing = True

    async def open_it(_self: object) -> None:
        if failing:
            raise OSError(CANARY)

    async with opened(plugin(delivered, open=open_it)) as sink:
        [verdict] = await sink.deliver([an_event()], soon())
        assert isinstance(verdict, Unavailable)
        assert "cannot be opened: OSError at " in verdict.reason
        assert sink.trouble == verdict.reason
        assert CANARY not in verdict.reason
        failing = False
        assert await sink.deliver([an_event()], soon()) == [DELIVERED]
        assert sink.trouble is None


async def test_a_plugin_whose_opening_does_not_end_delays_no_start() -> None:
    async def open_it(_self: object) -> None:
        await asyncio.sleep(60)

    began = time.monotonic()
    async with opened(plugin(delivered, open=open_it), **QUICK) as sink:
        assert time.monotonic() - began < 0.2
        [verdict] = await sink.deliver([an_event()], soon())
        assert isinstance(verdict, Unavailable)
        assert "was not opened within 0.2 s" in verdict.reason


CHECKS = {
    "text": (lambda: "no stream", "no stream"),
    "secret": (lambda: f"refused {CANARY}", "refused …"),
    "lines": (lambda: "a\nb\x00", "a b "),
    "number": (lambda: 3, "the plug-in returned neither a text nor None from check"),
    "raises": (lambda: 1 / 0, "the plug-in raised ZeroDivisionError at unit/test_plugin_sink.py:"),
    "exits": (lambda: sys.exit(0), "the plug-in raised SystemExit at unit/test_plugin_sink.py:"),
}


@pytest.mark.parametrize(("result", "said"), CHECKS.values(), ids=CHECKS.keys())
async def test_a_check_is_a_line_without_a_secret(result: Callable[[], Any], said: str) -> None:
    async def check(_self: object) -> Any:
        return result()

    async with opened(plugin(delivered, check=check)) as sink:
        found = await sink.check()
        assert found is not None
        assert found.startswith(said)


async def test_a_check_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from outbox_relay.sinks.plugin import sink as module

    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)

    async def check(_self: object) -> None:
        await asyncio.sleep(60)

    async with opened(plugin(delivered, check=check)) as sink:
        assert await sink.check() == "the plug-in did not check its destination within 0.1 s"


async def test_a_held_key_is_kept_in_order_by_the_relay() -> None:
    """Goes red when a plug-in gets batches although nothing of a key may follow a dead letter."""
    async with opened(plugin(delivered)) as sink:
        assert (sink.keeps_order, sink.max_batch, sink.max_in_flight) == (True, 100, 4)
    async with opened(plugin(delivered), when_dead="hold") as sink:
        assert (sink.keeps_order, sink.max_batch, sink.max_in_flight) == (False, 1, 4)
    async with opened(plugin(delivered), when_dead="hold", order="none") as sink:
        assert sink.keeps_order


async def test_a_client_of_a_replay_has_the_slots_of_the_replay() -> None:
    kind = plugin(delivered, keeps_order=False, max_in_flight=64)
    async with opened(kind, SinkContext("crm", replay=7, slots=16)) as sink:
        assert sink.max_in_flight == 16


async def test_deliveries_that_are_recorded_have_their_duration() -> None:
    async with opened(plugin(delivered)) as sink:
        [first] = await sink.deliver([an_event()], soon())
        [second] = await sink.deliver([an_event()], soon(), 2)
    assert isinstance(first, Delivered)
    assert isinstance(second, Delivered)
    assert (first.seconds, second.seconds is not None) == (None, True)
    async with opened(plugin(delivered), record_attempts="all") as sink:
        [third] = await sink.deliver([an_event()], soon())
    assert isinstance(third, Delivered)
    assert third.seconds is not None


# -- verdicts ---------------------------------------------------------------------------------------------------------


def read(verdict: object, event: StoredEvent | None = None) -> Verdict:
    found = read_verdicts([verdict], [event or an_event()], [CANARY])
    assert not isinstance(found, str), found
    return found[0]


def test_a_reason_repeats_neither_a_setting_nor_key_or_payload_and_is_one_line() -> None:
    event = an_event("customer-17", b"secret payload")
    said = f"{CANARY} customer-17 secret payload\nx\x00"
    for verdict in (Failed(said), Refused(said), Unavailable(said), Unavailable("x", part=said)):
        found = read(verdict, event)
        text = found.part if isinstance(found, Unavailable) and found.part else getattr(found, "reason", "")
        assert text == "… … … x "
    attempt = Attempt(said, answer=said, steps=((said, 1.0),))
    assert read(Failed("x", attempt=attempt), event) == Failed(
        "x", attempt=Attempt("… … … x ", None, "… … … x ", (("… … … x ", 1.0),))
    )
    assert cast("Failed", read(Failed("y" * 10_000))).reason == "y" * 499 + "…"


ODD: list[tuple[Any, Verdict]] = [
    (Failed("x", cast("Any", "404"), cast("Any", "soon")), Failed("x")),
    (Failed("x", 10**30, math.nan), Failed("x")),
    (Failed("x", -1, -1.0), Failed("x")),
    (Failed("x", 404, 3), Failed("x", 404, 3.0)),
    (Failed("x", attempt=cast("Any", "slow")), Failed("x")),
    (Refused("x", cast("Any", True)), Refused("x")),
    (Unavailable("x", throttled=cast("Any", 1), gone=cast("Any", "no")), Unavailable("x")),
    (
        Unavailable("x", throttled=True, gone=True, behind=True),
        Unavailable("x", throttled=True, gone=True, behind=True),
    ),
    (Unavailable("x", part=cast("Any", 3)), Unavailable("x")),
]


@pytest.mark.parametrize(("answered", "taken"), ODD, ids=[str(n) for n, _ in enumerate(ODD)])
def test_odd_details_of_a_verdict_are_left_out(answered: object, taken: Verdict) -> None:
    assert read(answered) == taken


def test_details_of_a_delivery_are_bounded() -> None:
    found = read(Delivered(200, 0.5, {"n": 2**70, "a": "x" * 1000, **{f"k{n}": n for n in range(100)}}))
    assert isinstance(found, Delivered)
    assert (found.status, found.seconds) == (200, 0.5)
    assert found.detail is not None
    assert len(found.detail) == 16
    assert len(str(found.detail["a"])) == 200


def test_nothing_counts_as_delivered_behind_an_undelivered_event_of_its_key() -> None:
    """Goes red when a plug-in that delivers past a failure moves the position past that event."""
    events = [an_event(key) for key in ("a", "b", "a", None, "b", "c")]
    verdicts: list[Verdict] = [Failed("x"), Refused("y"), DELIVERED, Unavailable("z"), DELIVERED, DELIVERED]
    kinds = [type(verdict) for verdict in in_order(events, verdicts)]
    assert kinds == [Failed, Refused, Unavailable, Unavailable, Delivered, Delivered]


async def test_a_call_that_comes_when_the_plugin_has_just_been_opened_overtakes_none_that_waited_for_it() -> None:
    """Goes red when calls that find the plug-in open do not wait for those that are about to learn it."""
    may_open = threading.Event()
    got = list[int]()

    def note(batch: Sequence[StoredEvent]) -> list[Verdict]:
        got.extend(event.id for event in batch)
        return delivered(batch)

    async def opening(_plugin: OddPlugin) -> None:
        may_open.wait(10)

    events = some_events(2, keys=1)
    async with opened(plugin(note, open=opening)) as sink:
        first = asyncio.ensure_future(sink.deliver(events[:1], soon()))
        await asyncio.sleep(0)
        may_open.set()
        cast("Any", sink)._opening.ended.result(10)  # the loop does not learn of it meanwhile
        await asyncio.gather(first, sink.deliver(events[1:], soon()))
    assert got == [event.id for event in events]
