"""Warms up a broker on the Java platform, which compiles frequently used code while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Producer

RECORD = b"x" * 250
KEYS = 5_000
IN_FLIGHT = 20
"""Maximum number of unacknowledged records if each is a separate request."""
MANY_IN_FLIGHT = 20_000
POLL_SECONDS = 0.01
FLUSH_SECONDS = 10.0
SINGLE = {"batch.num.messages": 1, "linger.ms": 0}
BATCHED = {"linger.ms": 5}


def warm(bootstrap: str, topic: str, seconds: float, check: Callable[[], None]) -> None:
    """Send records to `topic` for `seconds`, half of the time one per request, then in batches."""
    for settings, most in ((SINGLE, IN_FLIGHT), (BATCHED, MANY_IN_FLIGHT)):
        producer = Producer({**settings, "enable.idempotence": True, "bootstrap.servers": bootstrap, "log_level": 0})
        end = time.monotonic() + seconds / 2
        number = 0
        while time.monotonic() < end:
            check()
            if len(producer) < most:
                number += 1
                producer.produce(topic, RECORD, b"k%d" % (number % KEYS), headers=[("id", b"0" * 36)])
                producer.poll(0)
            else:
                producer.poll(POLL_SECONDS)
        producer.flush(FLUSH_SECONDS)
