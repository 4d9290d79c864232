"""Limits across relays of whole processes whose files change."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.receiver.gauge import Gauge
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

SLOW, FAST = "rate_per_second = 2\nmax_in_flight_total = 2\n", "rate_per_second = 400\nmax_in_flight_total = 6\n"


@pytest.fixture
def gauge() -> Gauge:
    return Gauge()


@pytest.fixture
def receiver(gauge: Gauge) -> Generator[Receiver]:
    with Receiver(gauge.answer) as receiver:
        yield receiver


def config(database: Database, receiver: Receiver, directory: Path, claim: str, limits: str) -> str:
    """Return the file of a relay whose sink has these limits."""
    order = 'claim = "rows"\norder = "none"\n' if claim == "rows" else ""
    text = webhook_config(database.dsn, receiver, directory)
    return text.replace('type = "webhook"\n', f'type = "webhook"\ntimeout_seconds = 2\n{order}{limits}', 1)


def emit(database: Database, events: int) -> None:
    """Emit events of many keys in one transaction."""
    query(database, "select outbox.emit('a.b', '1', key => n::text) from generate_series(1, %s) n", events)


def sink_of(relay: RelayService) -> dict[str, Any]:
    """Return what `status` says of the sink."""
    found: dict[str, Any] = json.loads(outbox_relay("status", "-c", relay.config, "--json").out)
    return found["sinks"]["crm"]


@pytest.mark.slow  # test_shared_rate applies the newest configuration
@pytest.mark.parametrize("claim", ["log", "rows"])
def test_a_reload_applies_limits_and_removes_them(
    database: Database, receiver: Receiver, gauge: Gauge, tmp_path: Path, claim: str
) -> None:
    """Goes red when a limit needs a restart, and when a changed one ends a session, which the relay's judge says."""
    text = config(database, receiver, tmp_path, claim, SLOW)
    with RelayService(tmp_path, text, "one") as one:
        emit(database, 300)
        until(lambda: len(receiver.requests) > 2, seconds=30, what="events flow")
        assert gauge.most <= 2
        shown = outbox_relay("config", "show", "-c", one.config).out
        assert ("rate_per_second = 2" in shown, "max_in_flight_total = 2" in shown) == (True, True)
        one.config.write_text(one.config.read_text().replace(SLOW, FAST))
        before = len(receiver.requests)
        one.send(signal.SIGHUP)
        until(lambda: len(receiver.requests) > before + 50, seconds=30, what="events flow faster")
        assert gauge.most <= 6
        found = sink_of(one)
        assert (found["rate_per_second"], found["max_in_flight_total"]) == (400, 6)
        until(lambda: len(receiver.requests) == 300, seconds=60, what="all come")
        one.config.write_text(one.config.read_text().replace(FAST, ""))
        one.send(signal.SIGHUP)
        gone = "select from outbox.sink where coalesce(rate_per_second, max_in_flight_total) is null"
        until(lambda: query(database, gone) != [], seconds=30, what="the limits are gone")
        gauge.answer_seconds = 0.5
        emit(database, 60)
        until(lambda: gauge.most > 6, seconds=30, what="more are in flight")
