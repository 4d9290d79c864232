"""The display on stderr while the demo runs: a live table on a terminal, otherwise one line per second."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outbox_relay.workbench.demo.report import format_latency
from outbox_relay.workbench.shop.figures import Latency

MESSAGE_LINES = 8
LINE_SECONDS = 1.0


@dataclass(frozen=True)
class DestinationState:
    """The state of one destination."""

    name: str
    kind: str
    arrived: int
    per_second: float
    backlog: int
    """Number of committed events that have not arrived yet."""
    latency: Latency


@dataclass(frozen=True)
class RelayState:
    """The state of one relay process: a word, and the number of its shards by sink."""

    name: str
    state: str
    shards: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class DemoState:
    """The state of the demo; `elapsed_seconds` is the time since the load began."""

    elapsed_seconds: float
    load_seconds: float
    committed: int
    per_second: float
    allowed_per_second: float
    """Limit of the shop's emit rate."""
    destinations: Sequence[DestinationState]
    relays: Sequence[RelayState]


class Screen(Protocol):
    """Context manager that displays messages and the state of the demo."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, message: str) -> None:
        """Display a message."""
        ...

    def show(self, state: DemoState) -> None:
        """Display the current state."""
        ...


def open_screen() -> Screen:
    """Return a live screen if stderr is a terminal, otherwise a plain one."""
    console = Console(stderr=True)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen()


class PlainScreen:
    """Screen that writes lines of text."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def say(self, message: str) -> None:
        """Write the message as a line."""
        _write(message)

    def show(self, state: DemoState) -> None:
        """Write a line, at most once a second and not before the load begins."""
        if not state.elapsed_seconds or time.monotonic() < self._shown_at + LINE_SECONDS:
            return
        self._shown_at = time.monotonic()
        parts = [f"{state.elapsed_seconds:5.1f} s  committed {state.committed:,} ({state.per_second:,.0f}/s)"]
        parts += [
            f"{one.name} {one.per_second:,.0f}/s, backlog {one.backlog:,}, "
            f"p50 {format_latency(one.latency.p50_seconds)}, p99 {format_latency(one.latency.p99_seconds)}"
            for one in state.destinations
        ]
        _write("  |  ".join(parts))


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class LiveScreen:
    """Screen that redraws a table in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._messages: deque[tuple[float, str]] = deque(maxlen=MESSAGE_LINES)
        self._began = time.monotonic()
        self._state: DemoState | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, message: str) -> None:
        """Show the message below the table, or write it after the table is final."""
        self._messages.append((time.monotonic() - self._began, message))
        if self._live.is_started:
            self._draw()
        else:
            _write(message)

    def show(self, state: DemoState) -> None:
        """Redraw the table."""
        self._state = state
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(*self._content()), refresh=True)

    def _content(self) -> Sequence[RenderableType]:
        messages = Text("\n").join(Text.assemble((f"{at:5.1f} s  ", "dim"), text) for at, text in self._messages)
        if self._state is None:
            return [messages]
        return [_progress(self._state), _destinations(self._state), _relays(self._state), messages]


def _progress(state: DemoState) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    elapsed_seconds = min(state.elapsed_seconds, state.load_seconds)
    line.add_row(
        ProgressBar(state.load_seconds, elapsed_seconds, width=20),
        f"{elapsed_seconds:.0f} of {state.load_seconds:.0f} s",
        f"{state.committed:,} committed, {state.per_second:,.0f}/s",
        Text(f"(limit {state.allowed_per_second:,.0f}/s)", style="dim"),
    )
    return line


def _destinations(state: DemoState) -> RenderableType:
    table = Table()
    table.add_column("destination", no_wrap=True)
    for heading in ("arrived", "per second", "backlog", "p50", "p99"):
        table.add_column(heading, justify="right", min_width=8)
    for one in state.destinations:
        table.add_row(
            f"{one.name} ({one.kind})",
            f"{one.arrived:,}",
            f"{one.per_second:,.0f}",
            f"{one.backlog:,}",
            format_latency(one.latency.p50_seconds),
            format_latency(one.latency.p99_seconds),
        )
    return table


def _relays(state: DemoState) -> RenderableType:
    table = Table("relay", "state", "shards")
    for one in state.relays:
        style = "red" if one.state == "killed" else ""
        shards = ", ".join(f"{name} {count}" for name, count in sorted(one.shards.items()))
        table.add_row(one.name, one.state, shards, style=style)
    return table
