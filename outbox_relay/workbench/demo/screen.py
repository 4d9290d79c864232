"""What is to be seen while the demo runs, on stderr: a live table on a terminal, else a line a second."""

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

from outbox_relay.workbench.demo.figures import Latency
from outbox_relay.workbench.demo.report import format_latency

NEWS_LINES = 8
LINE_SECONDS = 1.0


@dataclass(frozen=True)
class DestinationState:
    """One destination."""

    name: str
    kind: str
    arrived: int
    per_second: float
    behind: int
    """Committed events that have not arrived yet."""
    recent: Latency


@dataclass(frozen=True)
class RelayState:
    """One relay process: `state` in a word, its shards by sink."""

    name: str
    state: str
    shards: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class DemoState:
    """Everything at one moment; `passed_seconds` are of the load."""

    passed_seconds: float
    load_seconds: float
    committed: int
    per_second: float
    pace: float
    """What the shop may emit, in events per second."""
    destinations: Sequence[DestinationState]
    relays: Sequence[RelayState]


class Screen(Protocol):
    """Shows what happens; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, news: str) -> None:
        """Something has just happened."""
        ...

    def show(self, now: DemoState) -> None:
        """This is how things are."""
        ...


def open_screen() -> Screen:
    """The view that fits stderr."""
    console = Console(stderr=True)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen()


class PlainScreen:
    """Lines of text."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing has to be put back."""

    def say(self, news: str) -> None:
        """Write it."""
        _write(news)

    def show(self, now: DemoState) -> None:
        """Write a line, once a second at most, and none before the load begins."""
        if not now.passed_seconds or time.monotonic() < self._shown_at + LINE_SECONDS:
            return
        self._shown_at = time.monotonic()
        parts = [f"{now.passed_seconds:5.1f} s  committed {now.committed:,} (+{now.per_second:,.0f}/s)"]
        parts += [
            f"{one.name} +{one.per_second:,.0f}/s, {one.behind:,} behind, "
            f"p50 {format_latency(one.recent.p50_seconds)}, p99 {format_latency(one.recent.p99_seconds)}"
            for one in now.destinations
        ]
        _write("  |  ".join(parts))


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class LiveScreen:
    """A picture that is drawn again and again in the same place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._news: deque[tuple[float, str]] = deque(maxlen=NEWS_LINES)
        self._began = time.monotonic()
        self._now: DemoState | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, news: str) -> None:
        """Show it among the news; write it below the picture when that is finished."""
        self._news.append((time.monotonic() - self._began, news))
        if self._live.is_started:
            self._draw()
        else:
            _write(news)

    def show(self, now: DemoState) -> None:
        """Draw it."""
        self._now = now
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(*self._picture()), refresh=True)

    def _picture(self) -> Sequence[RenderableType]:
        news = Text("\n").join(Text.assemble((f"{at:5.1f} s  ", "dim"), text) for at, text in self._news)
        if self._now is None:
            return [news]
        return [_progress(self._now), _destinations(self._now), _relays(self._now), news]


def _progress(now: DemoState) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    passed_seconds = min(now.passed_seconds, now.load_seconds)
    line.add_row(
        ProgressBar(now.load_seconds, passed_seconds, width=20),
        f"{passed_seconds:.0f} of {now.load_seconds:.0f} s",
        f"{now.committed:,} committed, {now.per_second:,.0f}/s",
        Text(f"(allowed {now.pace:,.0f}/s)", style="dim"),
    )
    return line


def _destinations(now: DemoState) -> RenderableType:
    table = Table()
    table.add_column("destination", no_wrap=True)
    for heading in ("arrived", "per second", "behind", "p50", "p99"):
        table.add_column(heading, justify="right", min_width=8)
    for one in now.destinations:
        table.add_row(
            f"{one.name} ({one.kind})",
            f"{one.arrived:,}",
            f"{one.per_second:,.0f}",
            f"{one.behind:,}",
            format_latency(one.recent.p50_seconds),
            format_latency(one.recent.p99_seconds),
        )
    return table


def _relays(now: DemoState) -> RenderableType:
    table = Table("relay", "state", "shards")
    for one in now.relays:
        style = "red" if one.state == "killed" else ""
        shards = ", ".join(f"{name} {count}" for name, count in sorted(one.shards.items()))
        table.add_row(one.name, one.state, shards, style=style)
    return table
