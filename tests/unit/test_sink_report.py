"""The report of a sink's state to the database."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import SinkReport
from tests.support.relay_harness import spec


class Recording:
    """A store that keeps reports, or fails."""

    def __init__(self) -> None:
        self.fails = False
        self.reports: list[object] = []

    async def record_circuit(self, *report: object) -> None:
        """Keep the report."""
        if self.fails:
            raise StatementFailed("the statement timed out", "57014")
        self.reports.append(report)


async def test_the_end_of_a_trouble_is_news_until_its_report_is_in_the_database() -> None:
    """Goes red when it counts as reported before the statement has succeeded."""
    store: Any = Recording()
    parts: Any = SimpleNamespace(state="closed", gone=None, reduced_limit=None, notice="a topic is unknown")
    parts.troubles_over = 0
    report = SinkReport(store, spec("s"), SinkLeases("s", 1), parts, parts, parts, asyncio.Event())
    await report._record()  # pyright: ignore[reportPrivateUsage]
    parts.troubles_over, store.fails = 1, True
    with pytest.raises(StatementFailed):
        await report._record()  # pyright: ignore[reportPrivateUsage]
    store.fails = False
    await report._record()  # pyright: ignore[reportPrivateUsage]
    await report._record()  # pyright: ignore[reportPrivateUsage]
    assert len(store.reports) == 2
