"""A relay that records and exports nothing, for comparison: `python -m tests.bench.unmeasured run -c FILE`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from outbox_relay import cli
from outbox_relay.domain.measures import Histogram, SinkMeasures
from outbox_relay.service.metrics.figures import Figures
from outbox_relay.service.metrics.history import History

TIMED = ("log_reader", "parked_claims", "parked_settler", "settler")
"""The modules that time statements."""


def record_nothing(*_: Any) -> int:
    """Return the first bucket."""
    return 0


def untimed(_: Histogram) -> AbstractContextManager[None]:
    """Return a block that is not timed."""
    return nullcontext()


async def rest(_: object) -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


def main() -> int:
    """Run the command line without metrics, and return its exit code."""
    for name in ("delivered", "attempted", "died", "lost_rows", "begin_call", "end_call"):
        patch.object(SinkMeasures, name, record_nothing).start()
    patch.object(Histogram, "observe", record_nothing).start()
    for module in TIMED:
        patch(f"outbox_relay.relay.{module}.timed", untimed).start()
    patch.object(Figures, "run", rest).start()
    patch.object(History, "run", rest).start()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
