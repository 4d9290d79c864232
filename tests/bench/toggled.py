"""A relay with more work for metrics between each two SIGUSR1: `python -m tests.bench.toggled PART run -c FILE`.

PART is `records`, all that counts or times something in the process, which is done eleven times instead of once, or
`figures`, those of the database, of which a round begins every second instead of none. With `scrapes` each request to
`/metrics` is answered by a rendering of its own, and the signal has no effect.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from outbox_relay.domain.measures import Histogram, RelayMeasures, SinkMeasures
from outbox_relay.relay.timing import timed
from outbox_relay.service.metrics.figures import ROUND_SECONDS

from outbox_relay import cli
from outbox_relay.service.metrics import exposition, figures

TIMES = 10
"""Number of times that the usual work is added."""
TIMED = ("log_reader", "parked_claims", "parked_settler", "settler")
"""The modules that time statements."""
initialize = RelayMeasures.__init__


class TickHistogram(Histogram):
    """The histogram of ticks, whose observations are repeated apart from those of others."""


def repeated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a call, and makes it ``TIMES`` times again."""

    def repeat(*arguments: Any) -> Any:
        for _ in range(TIMES):
            call(*arguments)
        return call(*arguments)

    return repeat


@contextmanager
def timed_repeatedly(histogram: Histogram) -> Generator[None]:
    """Time a block, and ``TIMES`` empty blocks."""
    with timed(histogram):
        yield
    for _ in range(TIMES):
        with timed(histogram):
            pass


def of_records() -> list[AbstractContextManager[object]]:
    """Return the replacements with which everything is recorded repeatedly."""
    names = ("delivered", "attempted", "begin_call", "end_call")
    return [
        *(patch.object(SinkMeasures, name, repeated(getattr(SinkMeasures, name))) for name in names),
        *(patch(f"outbox_relay.relay.{module}.timed", timed_repeatedly) for module in TIMED),
        patch.object(TickHistogram, "observe", repeated(Histogram.observe)),
    ]


def no_round(_: figures.Figures) -> None:
    """Measure no figure."""


def of_figures() -> list[AbstractContextManager[object]]:
    """Return the replacement with which a round does nothing."""
    return [patch.object(figures.Figures, "round", no_round)]


REPLACEMENTS: dict[str, Callable[[], list[AbstractContextManager[object]]]] = {
    "records": of_records,
    "figures": of_figures,
    "scrapes": list,
}


class Toggle:
    """Applies the replacements of a part, or takes them back, at each call."""

    def __init__(self, part: str) -> None:
        self._replacements = REPLACEMENTS[part]
        self._applied: ExitStack | None = None

    def __call__(self, *_: object) -> None:
        if self._applied is not None:
            self._applied.close()
            self._applied = None
            return
        self._applied = ExitStack()
        for replacement in self._replacements():
            self._applied.enter_context(replacement)


def with_tick_histogram(measures: RelayMeasures) -> None:
    """Initialize the measures of a process, with ticks that are repeated apart from other observations."""
    initialize(measures)
    measures.tick = TickHistogram()


def main(part: str, arguments: list[str]) -> int:
    """Run the command line, and return its exit code."""
    patch.object(RelayMeasures, "__init__", with_tick_histogram).start()
    toggle = Toggle(part)
    if part == "scrapes":
        patch.object(exposition, "KEPT_SECONDS", 0.0).start()
    if part == "figures":
        patch("outbox_relay.service.build.ROUND_SECONDS", ROUND_SECONDS / TIMES).start()
        toggle()
    signal.signal(signal.SIGUSR1, toggle)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
