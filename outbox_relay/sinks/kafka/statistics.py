"""What librdkafka counts about a sink's producers, kept small for whoever shows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

_TOPICS = '"topics":'


class Statistics(NamedTuple):
    """The producers of one sink together, as of librdkafka's last report (``statistics.interval.ms``).

    What is counted is counted since the sink was opened, by producers that were replaced too.
    """

    producers: int
    """Producers that have reported."""
    brokers_up: int
    """Their connections to brokers that are ready for requests."""
    queued_records: int
    """Records handed over and not acknowledged."""
    queued_bytes: int
    round_trip_seconds: float
    """Mean time from a request to its answer, over all brokers, in the last interval; 0 when there was none."""
    round_trip_p99_seconds: float
    """The slowest broker's 99th percentile of it."""
    requests: int
    """Requests sent to brokers."""
    request_errors: int
    """Requests that could not be sent (txerrs)."""
    request_retries: int
    request_timeouts: int

    @classmethod
    def of(cls, text: str) -> Statistics:
        """The statistics of one producer, from the JSON that librdkafka gives (its STATISTICS.md)."""
        # What it says of topics grows with their number, comes last, and is not needed.
        head, topics, _ = text.partition(_TOPICS)
        found = cast("dict[str, Any]", json.loads(f"{head.rstrip().rstrip(',')}}}" if topics else text))
        brokers = list(cast("dict[str, dict[str, Any]]", found.get("brokers", {})).values())
        trips = [broker["rtt"] for broker in brokers if broker.get("rtt", {}).get("cnt", 0)]
        answers = sum(int(trip["cnt"]) for trip in trips)
        return cls(
            producers=1,
            brokers_up=sum(broker.get("state") == "UP" for broker in brokers),
            queued_records=int(found.get("msg_cnt", 0)),
            queued_bytes=int(found.get("msg_size", 0)),
            round_trip_seconds=sum(trip["avg"] * trip["cnt"] for trip in trips) / answers / 1e6 if answers else 0.0,
            round_trip_p99_seconds=max((trip["p99"] / 1e6 for trip in trips), default=0.0),
            requests=_sum(brokers, "tx"),
            request_errors=_sum(brokers, "txerrs"),
            request_retries=_sum(brokers, "txretries"),
            request_timeouts=_sum(brokers, "req_timeouts"),
        )


NOTHING = Statistics(0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0)


def together(parts: Iterable[Statistics]) -> Statistics:
    """Several producers as one; times are those of the slowest."""
    total = NOTHING
    for part in parts:
        total = Statistics(
            total.producers + part.producers,
            total.brokers_up + part.brokers_up,
            total.queued_records + part.queued_records,
            total.queued_bytes + part.queued_bytes,
            max(total.round_trip_seconds, part.round_trip_seconds),
            max(total.round_trip_p99_seconds, part.round_trip_p99_seconds),
            total.requests + part.requests,
            total.request_errors + part.request_errors,
            total.request_retries + part.request_retries,
            total.request_timeouts + part.request_timeouts,
        )
    return total


def ended(last: Statistics) -> Statistics:
    """What remains of a producer that was closed: its counts."""
    return last._replace(
        producers=0, brokers_up=0, queued_records=0, queued_bytes=0, round_trip_seconds=0.0, round_trip_p99_seconds=0.0
    )


def _sum(brokers: Iterable[dict[str, Any]], name: str) -> int:
    return sum(int(broker.get(name, 0)) for broker in brokers)
