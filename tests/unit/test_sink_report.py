"""The report of a sink's state to the database."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.rows import SinkRow
from outbox_relay.relay import sink_report
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import SinkReport
from tests.support.logs import RecordedLog
from tests.support.relay_harness import spec

ROW = SinkRow("s", 1, paused=False, circuit="closed", in_flight_limit=None, unowned=0, patterns=("*",))


class Recording:
    """A store that keeps reports, or fails."""

    def __init__(self) -> None:
        self.fails = False
        self.paused: str | None = None
        self.mended: list[bool] = []
        self.failures: list[str] = []
        self.reports: list[object] = []

    async def record_circuit(self, *report: object) -> str | None:
        """Keep the report."""
        if self.fails:
            raise StatementFailed("the statement timed out", "57014")
        self.reports.append(report)
        return self.paused

    async def pause_sink(self, *_: object) -> bool:
        """Pause the sink, which was not paused."""
        return True

    async def record_failure(self, _sink: str, error: str) -> None:
        """Keep the error of a closed circuit."""
        self.failures.append(error)

    async def record_mended(self, _sink: str, *, own: bool) -> None:
        """Keep that the error is over."""
        self.mended.append(own)


class Reported:
    """A report, the store and log that it writes to, and the parts that it reports, as attributes of one object."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sink_report, "RECORD_SECONDS", 0.0)
        self.store, self.log, self.due = Recording(), RecordedLog(), asyncio.Event()
        self.leases = SinkLeases("s", 1)
        self.parts: Any = SimpleNamespace(
            state="closed", closed=True, failing_since=None, failures=0, gone=None, last_error=None,
            reduced_limit=None, notice=None, troubles={}, troubles_over=0, forget_gone=self._forget_gone,
        )  # fmt: skip
        parts, store = self.parts, cast("Any", self.store)
        self.report = SinkReport(store, spec("s"), self.leases, parts, parts, parts, self.due, self.log)

    def _forget_gone(self) -> None:
        self.parts.gone = None

    async def now(self, **changes: Any) -> None:
        """Apply changes of the parts, and report what is due."""
        for name, value in changes.items():
            setattr(self.parts, name, value)
        if changes:
            self.parts.closed = self.parts.state == "closed"
            self.due.set()
        running = asyncio.create_task(self.report.run())
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    return Reported(monkeypatch)


async def test_the_end_of_a_trouble_is_news_until_its_report_is_in_the_database(reported: Reported) -> None:
    """Goes red when it counts as reported before the statement has succeeded."""
    await reported.now(notice="a topic is unknown")
    reported.store.fails = True
    await reported.now(troubles_over=1)
    assert len(reported.store.reports) == 1
    reported.store.fails = False
    await reported.now(troubles_over=1)
    await reported.now(troubles_over=1)
    assert len(reported.store.reports) == 2


# -- errors of a closed circuit ---------------------------------------------------------------------------------------


async def test_an_error_that_no_delivery_follows_is_reported_although_the_circuit_is_closed(
    reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when a sink with few events counts as healthy while each of them fails."""
    await reported.now(failing_since=time.monotonic(), failures=1, last_error="no such host")
    assert reported.store.failures == [], "it may be over at once"
    monkeypatch.setattr(sink_report, "FAILING_SECONDS", 0.0)
    await reported.now()
    await reported.now(notice=None)
    assert reported.store.failures == ["no such host"], (
        "each failure is recorded once: it may be over without a delivery"
    )
    await reported.now(failures=2)
    assert len(reported.store.failures) == 2
    await reported.now(failing_since=None)
    reported.report.delivered()
    await reported.now()
    assert reported.store.mended == [True]


async def test_the_circuit_of_another_relay_stays_as_it_is_while_this_one_fails(
    reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when a relay whose circuit is closed ends the outage that another one has reported."""
    monkeypatch.setattr(sink_report, "FAILING_SECONDS", 0.0)
    await reported.now()
    reported.leases.observe(ROW._replace(circuit="open"), stopping=False)
    reported.due.clear()
    reported.parts.failing_since, reported.parts.failures, reported.parts.last_error = 0.0, 1, "refused"
    before = len(reported.store.reports)
    await reported.now()
    assert (len(reported.store.reports), reported.store.failures) == (before, ["refused"])


# -- errors that are over ---------------------------------------------------------------------------------------------


async def test_an_error_is_over_once_the_circuit_is_closed_and_an_event_was_delivered_after_it(
    reported: Reported,
) -> None:
    await reported.now(state="open", last_error="refused")
    await reported.now(state="closed")
    assert reported.store.mended == [], "it was not delivered to since"
    reported.report.delivered()
    await reported.now()
    assert reported.store.mended == [True]
    reported.report.delivered()
    assert not reported.due.is_set(), "it is recorded once"


async def test_what_was_delivered_before_an_error_does_not_end_it(reported: Reported) -> None:
    reported.report.delivered()
    await reported.now(state="open", last_error="refused")
    await reported.now(state="closed")
    assert reported.store.mended == []


async def test_the_trouble_of_a_part_is_not_over_while_other_parts_take_events(reported: Reported) -> None:
    await reported.now(notice="topic a: unknown", troubles={"topic a": "topic a: unknown"})
    reported.report.delivered()
    assert not reported.due.is_set()
    await reported.now(notice=None, troubles={}, troubles_over=1)
    assert reported.store.mended == [True]


async def test_errors_of_other_relays_are_looked_at_once_per_interval(reported: Reported) -> None:
    reported.leases.observe(ROW._replace(last_error_open=True), stopping=False)
    for _ in range(3):
        reported.report.delivered()
        await reported.now()
    assert reported.store.mended == [False]
    assert reported.store.reports == [("s", "closed", None, None, 432_000.0)]


async def test_a_delivery_without_an_error_before_it_makes_no_report_due(reported: Reported) -> None:
    reported.report.delivered()
    assert not reported.due.is_set()


# -- log lines --------------------------------------------------------------------------------------------------------


async def test_changes_are_logged_with_sink_and_reason(reported: Reported) -> None:
    await reported.now(state="open", last_error="refused", reduced_limit=8)
    await reported.now(state="closed", reduced_limit=None, troubles={"topic a": "topic a: unknown"})
    assert [event for _, event, _ in reported.log.lines] == [
        "circuit.opened",
        "sink.throttled",
        "circuit.closed",
        "sink.unthrottled",
        "sink.trouble",
    ]
    assert all(values["sink"] == "s" for _, _, values in reported.log.lines)


async def test_a_pause_by_this_relay_is_logged(reported: Reported) -> None:
    reported.store.paused = "the destination was down for 9 seconds"
    await reported.now(state="open", last_error="refused")
    reported.store.paused = None
    await reported.now(gone="answered 410")
    reasons = [values["reason"] for event, values in reported.log.warnings if event == "sink.paused"]
    assert reasons == ["the destination was down for 9 seconds", "answered 410"]
