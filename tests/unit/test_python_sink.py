"""Python sinks without a relay: verdicts of handlers, time limits, fences, and handlers that hang."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator
from pathlib import Path
from unittest.mock import Mock

import pytest

from outbox_relay.domain.errors import SessionReset, SinkStuck
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks import Call, threads
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.posting import THREAD
from outbox_relay.sinks.python import PythonSink
from outbox_relay.sinks.python import sink as module
from tests.support.odd_handlers import FAULTS, RECEIVED, RELEASE
from tests.support.python_sink import SECONDS, python_sink
from tests.support.wait import until

KINDS = ("asynchronous", "plain")
"""The handlers of ``odd_handlers`` that do as the payload says."""
TIMED_OUT = "the handler did not end in time"


@pytest.fixture(autouse=True)
def handled(monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """Yield what handlers have received, and let those that hang end."""
    monkeypatch.setattr(threads, "PATIENCE_SECONDS", 0.5)
    RECEIVED.clear()
    RELEASE.clear()
    yield RECEIVED
    RELEASE.set()


# -- verdicts -----------------------------------------------------------------------------------------------------

MESSAGES = {
    "raise": "ValueError: a b [31m",
    "base": "BaseException: base",
    "exit": "SystemExit: 3",
    "cancelled": "CancelledError",
    "unspeakable": "Unspeakable",
    "surrogates": "ValueError:  é ",
    "a group": "BaseExceptionGroup: both (2 sub-exceptions)",
}
"""Answers of the attempts: messages, which may contain the payload. Reasons contain only class and place."""
REASONS = {
    "a task asks": "the handler asked for a retry: busy",
    "retry in an hour": "the handler asked for a retry: busy",
    "bare retry": "the handler asked for a retry",
    "a coroutine": "the handler returned an awaitable, which has not run: await it in an async function",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_a_handler_costs_its_event_an_attempt_and_the_next_is_delivered(kind: str) -> None:
    with python_sink(kind, max_in_flight=64) as running:
        calls = [running.begin(name) for name in FAULTS]
        verdicts = dict(zip(FAULTS, running.end(*calls), strict=True))
        assert running.deliver("last") == DELIVERED
    assert isinstance(verdicts.pop("bare dead"), Refused)
    failed = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert failed.keys() == verdicts.keys()
    assert {name: failed[name].reason for name in REASONS} == REASONS
    answers = {name: failed[name].attempt for name in MESSAGES}
    assert {name: attempt and attempt.answer for name, attempt in answers.items()} == MESSAGES
    assert all("support/odd_handlers.py:" in failed[name].reason for name in MESSAGES)
    assert all(len(verdict.reason) <= 200 for verdict in failed.values())
    delays = {name: verdict.retry_after_seconds for name, verdict in failed.items()}
    assert {name: delay for name, delay in delays.items() if delay is not None} == {"retry in an hour": 3600.0}
    assert RECEIVED == ["last"]


def test_handlers_that_stop_the_event_loop_or_leave_a_task_hurt_no_other() -> None:
    with python_sink("asynchronous") as running:
        nap = running.begin("nap")
        calls = [running.begin(what) for what in ("stop the loop", "leave a task", "fine")]
        assert running.end(nap, *calls) == [DELIVERED] * 4


def test_values_of_context_variables_do_not_pass_from_event_to_event() -> None:
    with python_sink("plain", max_in_flight=1) as running:
        assert [running.deliver("context") for _ in range(3)] == [DELIVERED] * 3


# -- time limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_call_outlasts_the_limit_and_its_deadline_never_goes_back(kind: str) -> None:
    with python_sink(kind, timeout_seconds=0.4) as running:
        assert running.deliver("first") == DELIVERED
        call = running.begin("extend")

        def is_extended() -> bool:
            return running.sink.deadlines().get(call.events[0].id, 0) > lease_clock() + 50

        until(is_extended, seconds=SECONDS, what="the relay knows the new end")
        assert running.end(call) == [DELIVERED]
        assert not running.sink.deadlines()


def test_an_asynchronous_handler_that_does_not_end_is_cancelled() -> None:
    with python_sink("asynchronous", timeout_seconds=0.3) as running:
        verdict = running.deliver("sleep")
        assert isinstance(verdict, Failed)
        assert (verdict.reason, verdict.attempt and verdict.attempt.code) == (TIMED_OUT, "timeout")
        assert running.sink.trouble is None


@pytest.mark.parametrize(("kind", "what"), [("plain", "hang"), ("asynchronous", "stubborn")])
def test_a_handler_that_hangs_is_reported_and_others_are_called_until_all_hang(kind: str, what: str) -> None:
    with python_sink(kind, timeout_seconds=0.3, max_in_flight=2) as running:
        verdict = running.deliver(what)
        assert isinstance(verdict, Failed)
        assert verdict.reason == TIMED_OUT
        assert (running.sink.hanging, running.sink.fault) == (1, None)
        assert running.sink.trouble == "1 of 2 calls have not ended in time, and cannot be ended"
        assert running.deliver("fine") == DELIVERED
        assert isinstance(running.deliver(what), Failed)
        assert running.sink.fault == running.sink.trouble == "2 of 2 calls have not ended in time, and cannot be ended"
        with pytest.raises(SinkStuck, match="sink test: 2 of 2 calls"):
            running.deliver("no thread is left")
        RELEASE.set()
        until(lambda: not (running.sink.completed(0.1) or running.sink.hanging), seconds=SECONDS, what="they end")
        assert running.deliver("again") == DELIVERED
    assert RECEIVED[-1] == "again"


def test_a_handler_that_blocks_the_event_loop_is_found() -> None:
    with python_sink("asynchronous", timeout_seconds=0.3) as running:
        blocking = running.begin("hang")
        assert isinstance(running.end(blocking)[0], Failed)
        other = running.begin("not called")
        with pytest.raises(SinkStuck, match="the handler blocks the event loop"):
            running.end(other)
        RELEASE.set()
    assert RECEIVED == []


def test_a_handler_that_blocks_its_event_loop_does_not_delay_webhooks() -> None:
    sink = PythonSink("test", "tests.support.odd_handlers:asynchronous")
    sink.open()
    sink.submit(Call([an_event(None, b"hang")], lease_clock() + 60))
    assert not sink.completed(0.2)
    assert THREAD.run(asyncio.sleep(0, "answered"), SECONDS) == "answered"
    RELEASE.set()
    sink.withdraw()
    sink.close()


# -- fences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_whose_turn_comes_too_late_is_not_made(kind: str) -> None:
    """The lease of the shard may have ended, and another relay may have delivered the event."""
    with python_sink(kind, max_in_flight=1) as running:
        blocks = running.begin("block a while")
        late = running.begin("late", seconds=0.3)
        assert running.end(late, blocks) == [Unavailable("all threads are busy", behind=True), DELIVERED]
        assert running.deliver("last") == DELIVERED
    assert RECEIVED == ["last"]


@pytest.mark.fence("a handler is called after the time by which its call must begin")
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_its_thread_takes_too_late_is_not_made(kind: str) -> None:
    with python_sink(kind, max_in_flight=1) as running:
        late = running.begin("late", seconds=0.0)
        time.sleep(0.2)
        assert isinstance(running.end(late)[0], Unavailable)
    assert RECEIVED == []


@pytest.mark.fence("a relay that lost a shard delivers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_purge_from_another_thread_ends_calls_that_have_not_begun(kind: str) -> None:
    with python_sink(kind, max_in_flight=1) as running:
        blocks, waits = running.begin("block a while"), running.begin("waits")
        running.sink.purge()
        assert isinstance(running.end(waits)[0], Unavailable)
        assert running.end(blocks)[0] in (DELIVERED, threads.LATE)
    assert RECEIVED == []


def test_a_withdrawal_waits_for_handlers_that_run_and_counts_those_that_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "WITHDRAW_SECONDS", 0.6)
    with python_sink("plain", max_in_flight=3, timeout_seconds=2.0) as running:
        naps = running.begin("nap"), running.begin("hang")
        until(lambda: not running.sink._waiting, seconds=SECONDS, what="they run")  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(SessionReset):
            running.sink.withdraw()
        assert (RECEIVED, running.sink.hanging) == (["nap"], 0)
        monkeypatch.setattr(threads, "WITHDRAW_SECONDS", SECONDS)
        running.sink.withdraw()
        assert running.sink.hanging == 1
        assert not running.sink.completed(0.0)
        assert all(call.verdicts is None for call in naps)
        assert running.deliver("fine") == DELIVERED
        RELEASE.set()


def test_calls_begin_in_their_order_and_none_is_forgotten() -> None:
    with python_sink("plain", max_in_flight=2) as running:
        calls = [running.begin(str(number)) for number in range(200)]
        assert running.end(*calls) == [DELIVERED] * 200
    received = [int(line) for line in RECEIVED]
    assert sorted(received, key=lambda n: (n // 4, n)) == sorted(received)


# -- the import ---------------------------------------------------------------------------------------------------


def test_events_wait_for_a_handler_that_cannot_be_imported_until_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMPORT_SECONDS", 0.1)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with python_sink("shop_of_tests:send") as running:
        advice = "install it, or add its directory to PYTHONPATH"
        reason = f"handler: there is no module shop_of_tests: {advice}"
        assert running.sink.fault == running.sink.trouble == running.sink.check() == reason
        assert running.deliver("early") == Unavailable(reason)
        (tmp_path / "shop_of_tests.py").write_text("from tests.support.odd_handlers import plain as send\n")
        assert running.redeliver(an_event(None, b"fine")) == DELIVERED
        assert running.sink.fault is None
    sys.modules.pop("shop_of_tests")


def test_an_import_that_fails_oddly_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when such an import counts as running without end."""
    monkeypatch.setattr(module, "IMPORT_SECONDS", 0.1)
    load = Mock(side_effect=[FileNotFoundError("gone"), module.load("tests.support.odd_handlers:plain")])
    monkeypatch.setattr(module, "load", load)
    with python_sink("plain") as running:
        assert (
            running.sink.fault == "handler tests.support.odd_handlers:plain cannot be imported: FileNotFoundError: gone"
        )
        assert running.redeliver(an_event(None, b"fine")) == DELIVERED


def test_a_slow_import_makes_events_wait_and_delays_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code = "import time\nfrom tests.support.odd_handlers import plain as send\ntime.sleep(0.5)\n"
    (tmp_path / "slow_shop_of_tests.py").write_text(code)
    monkeypatch.setattr(module, "IMPORT_SECONDS", 0.1)
    began = time.monotonic()
    with python_sink("slow_shop_of_tests:send") as running:
        reason = "handler slow_shop_of_tests:send is being imported"
        assert running.deliver("fine") == Unavailable(reason)
        assert time.monotonic() - began < 0.4
        assert running.sink.fault == reason
        assert running.redeliver(an_event(None, b"fine")) == DELIVERED
    sys.modules.pop("slow_shop_of_tests")
