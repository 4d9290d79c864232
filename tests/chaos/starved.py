"""Faults that were not injected, from the logs of the relays: other reasons for restarts, mainly on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from tests.chaos.nemesis import Strike

STARVED = "relay starved"
"""A relay got no processor time or no answer in time, and one of its leases has or may have expired."""
STARVED_SIGNS = (
    "a tick took",
    "a lease could not be renewed in time",
    "the database did not answer within",
    "has another owner",
    "a shard was lost",
)
GIVEN_UP = "given up while down"
"""Follows the name of a sink: shards were released with unfinished events while its destination was down."""
GIVEN_UP_SIGN = "were given up with events in flight"


def starvations(logs: Iterable[Iterable[Mapping[str, Any]]]) -> Iterator[Strike]:
    """Yield a strike for each session that ended like this, even if an injected fault was the cause."""
    to_monotonic = time.monotonic() - time.time()
    for lines in logs:
        for line in lines:
            if fault := _given_up(line) or _fault(str(line.get("reason", ""))):
                at = datetime.fromisoformat(line["time"]).timestamp() + to_monotonic
                yield Strike(fault, at, at, str(line.get("reason", line["event"])))


def _given_up(line: Mapping[str, Any]) -> str | None:
    """Return the fault if a stopping relay released shards with unfinished events, otherwise None."""
    return f"{line['sink']} {GIVEN_UP}" if line.get("event") == "shards.released" and line.get("undone") else None


def _fault(reason: str) -> str | None:
    if GIVEN_UP_SIGN in reason:
        sink = reason.removeprefix("sink ").partition(":")[0]
        return f"{sink} {GIVEN_UP}"
    return STARVED if any(sign in reason for sign in STARVED_SIGNS) else None
