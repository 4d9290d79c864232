"""Records of a sink with a schema registry. To encode takes time, in which leases may end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.records import CONTENT_TYPE, Headers, RecordFormat

RUN_SECONDS = 0.05
"""Time after which no further event is encoded before reports are served and the clock is looked at."""


class EncodedRecords:
    """Makes the records of a few events in turn, those with an encoder in the format of their schema.

    Raises BufferError, as a client whose queue is full, when the time of the run is over, and before a record is handed
    over whose lease ended while it was encoded.
    """

    def __init__(self, record_format: RecordFormat | None, call: DeliverCall, indexes: Sequence[int]) -> None:
        self._format = record_format or RecordFormat()
        self._call = call
        self._indexes = (index for index in indexes if call.topics[index] is not None)
        self._pause_at = math.inf

    def record(self, event: StoredEvent) -> tuple[bytes | None, int, Headers]:
        """Return value, partition and headers of the next event.

        Raise ValueError, with a reason, for an event without a record.
        """
        now, call, index = time.monotonic(), self._call, next(self._indexes)
        if now > self._pause_at:
            raise BufferError
        self._pause_at = min(self._pause_at, now + RUN_SECONDS)
        value, partition, headers = self._format.record(event)
        encoder, topic = call.encoders[index], call.topics[index]
        if encoder is not None and topic is not None and value is not None:
            value = encoder.encode(topic, value)
            headers[CONTENT_TYPE] = ("content-type", encoder.content_type)
        if lease_clock() >= call.until:
            raise BufferError
        return value, partition, headers
