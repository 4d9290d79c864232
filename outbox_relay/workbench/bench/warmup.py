"""A broker that runs on the Java platform is measured warm: it compiles what it does most while it does it."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Producer

RECORD = b"x" * 250
KEYS = 5_000
UNDER_WAY = 20
"""Records that are not acknowledged, at most, where each is a request of its own."""
MANY_UNDER_WAY = 20_000
POLL_SECONDS = 0.01
FLUSH_SECONDS = 10.0
ALONE = {"batch.num.messages": 1, "linger.ms": 0}
TOGETHER = {"linger.ms": 5}


def warm(bootstrap: str, topic: str, seconds: float, check: Callable[[], None]) -> None:
    """Send records to `topic` for so long: half of the time one with each request, then many."""
    for settings, most in ((ALONE, UNDER_WAY), (TOGETHER, MANY_UNDER_WAY)):
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
