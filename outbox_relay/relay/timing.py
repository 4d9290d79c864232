"""The duration of a block, for the metrics."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from outbox_relay.domain.measures import Histogram


@contextmanager
def timed(histogram: Histogram) -> Generator[None]:
    """Add the duration of the block to ``histogram``, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        histogram.observe(time.monotonic() - began)
