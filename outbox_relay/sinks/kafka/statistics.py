"""librdkafka's statistics report (``statistics.interval.ms``)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

_TOPICS = '"topics":'


class Connections(NamedTuple):
    """The state of a client's connections."""

    up: bool
    """True if a broker is ready for requests."""
    owing: frozenset[int]
    """The ids of connected brokers that have records and have not acknowledged them."""


def connections(report: str) -> Connections:
    """Return the state of the connections from the JSON ``report`` (STATISTICS.md)."""
    # The topics come last, are not needed, and grow with their number.
    head, topics, _ = report.partition(_TOPICS)
    found = cast("dict[str, Any]", json.loads(f"{head.rstrip().rstrip(',')}}}" if topics else report))
    brokers = cast("dict[str, dict[str, Any]]", found.get("brokers", {})).values()
    up = [broker for broker in brokers if broker.get("state") == "UP"]
    owing = (each["nodeid"] for each in up if each.get("waitresp_msg_cnt", 0) + each.get("outbuf_msg_cnt", 0))
    return Connections(bool(up), frozenset(owing))
