"""librdkafka's statistics report (``statistics.interval.ms``)."""

from __future__ import annotations

import json
from typing import Any, cast

_TOPICS = '"topics":'


def broker_is_up(report: str) -> bool:
    """Return True if the JSON ``report`` (STATISTICS.md) shows a broker that is ready for requests."""
    # The topics come last, are not needed, and grow with their number.
    head, topics, _ = report.partition(_TOPICS)
    found = cast("dict[str, Any]", json.loads(f"{head.rstrip().rstrip(',')}}}" if topics else report))
    brokers = cast("dict[str, dict[str, Any]]", found.get("brokers", {}))
    return any(broker.get("state") == "UP" for broker in brokers.values())
