"""The screen of the demo: lines if stderr is not a terminal, otherwise a table that fits 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from outbox_relay.workbench.demo.screen import (
    DemoState,
    DestinationState,
    LiveScreen,
    PlainScreen,
    RelayState,
    open_screen,
)
from outbox_relay.workbench.shop.figures import Latency

RECENT = Latency(0.012, 0.345, 1.0)
NOW = DemoState(
    elapsed_seconds=7.25,
    load_seconds=20.0,
    committed=6_900,
    per_second=987.6,
    allowed_per_second=1_000.0,
    destinations=[
        DestinationState("events", "kafka", 6_890, 980.0, 10, RECENT),
        DestinationState("crm", "webhook", 6_000, 700.0, 900, Latency(None, None, None)),
    ],
    relays=[RelayState("relay-1", "killed"), RelayState("relay-2", "ready", {"events": 64, "crm": 64})],
)


def test_lines_are_written_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plain = open_screen()
    assert isinstance(plain, PlainScreen)
    with plain:
        plain.show(replace(NOW, elapsed_seconds=0.0))
        plain.say("the shop opens")
        plain.show(NOW)
        plain.show(NOW)
    assert capsys.readouterr().err.splitlines() == [
        "the shop opens",
        "  7.2 s  committed 6,900 (988/s)"
        "  |  events 980/s, backlog 10, p50 12 ms, p99 345 ms"
        "  |  crm 700/s, backlog 900, p50 -, p99 -",
    ]


def test_table_fits_a_small_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = io.StringIO()
    live = LiveScreen(Console(file=drawn, force_terminal=True, width=80, height=40, color_system=None))
    with live:
        live.say("starting")
        live.show(NOW)
        live.say("relay-1 was killed")
    live.say("stopped")
    last = drawn.getvalue().rpartition("relay-1 was killed")[0].rpartition("7 of 20 s")[2]
    cells = [tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in last.splitlines() if "│" in line]
    assert cells == [
        ("events (kafka)", "6,890", "980", "10", "12 ms", "345 ms"),
        ("crm (webhook)", "6,000", "700", "900", "-", "-"),
        ("relay-1", "killed", ""),
        ("relay-2", "ready", "crm 64, events 64"),
    ]
    assert capsys.readouterr().err == "stopped\n"
