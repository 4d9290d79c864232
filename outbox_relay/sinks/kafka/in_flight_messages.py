"""The open calls and the producers of their records. Used by one thread only; most methods block."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from confluent_kafka import KafkaError, KafkaException

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import ONE_AT_A_TIME, ClientLog, ClientSettings, error_of
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import RecordFormat

SINGLE_RECORDS = 0
"""Denotes the producer of records that are sent alone. All others are identified by their batch size."""
WAIT_SECONDS = 0.05
"""One wait for reports, or for space in the client's queue, when nothing else can be done."""
TURN_SECONDS = 0.002
"""The same for each of several producers, since another one may have reports meanwhile."""
SILENT_STALLS = 2.5
"""Maximum wait, in multiples of ``stall_seconds``, for a connected broker that owes acknowledgements and is silent."""
CALL_STALLS = 3.0
"""Usual maximum duration of a call in multiples of ``stall_seconds``, and each further time of calls with rows."""
PURGE_SECONDS = 5.0
"""Maximum wait for the reports of purged records. They need no broker, so they come at once."""
MAX_NAMED_TOPICS = 3
"""Maximum number of topics in a reason."""

Failure = tuple[int, int]
"""A failed record: the position of its call in ``calls`` and its index in the batch."""


class DeliveryHalted(Exception):
    """No event can be delivered now, so everything in flight is purged. The message is the reason."""


class DeliveryStalled(DeliveryHalted):
    """No acknowledgement has come for ``stall_seconds``."""


class InFlightMessages:
    """Serves the delivery reports of all open calls, and detects when none come any more.

    ``calls`` are in their order, and the records of each were handed over before those of the next. All records of a
    topic are on one producer, except those that are sent alone.
    """

    def __init__(
        self, settings: ClientSettings, log: ClientLog, record_format: RecordFormat, stall_seconds: float
    ) -> None:
        self.calls: deque[DeliverCall] = deque()
        self._producers: dict[int, RecordProducer] = {}
        self._settings = settings
        self._log = log
        self._format = record_format
        self._stall_seconds = stall_seconds
        self._reported = 0
        self._progress_at = self._checked_at = 0.0
        self.lease_until = 0.0
        """The ``lease_clock()`` value until which calls with events of the log may last. Set in the event loop."""
        self.waits_for: str | None = None
        """The acknowledgements that are waited for longer than usual, for people, or None."""

    @property
    def outstanding(self) -> int:
        """Return the number of records without a delivery report."""
        return sum(call.outstanding for call in self.calls)

    @property
    def fatal(self) -> str | None:
        """Return the fatal error of a producer, or None."""
        return next((producer.fatal for producer in self._producers.values() if producer.fatal is not None), None)

    @property
    def failed(self) -> bool:
        """Return True if a record or a producer has failed."""
        return self.fatal is not None or any(call.reports.failures for call in self.calls)

    def serve(self, seconds: float = 0.0) -> None:
        """Serve the available delivery reports, or wait up to ``seconds`` for some without lingering.

        Raise ``DeliveryHalted`` when waiting must end.
        """
        turn = seconds if len(self._producers) < 2 else min(seconds, TURN_SECONDS)
        for producer in self._producers.values():
            if turn:
                producer.flush_for(turn)
            else:
                producer.poll(0.0)
        reported = sum(call.reports.count for call in self.calls)
        if reported > self._reported:
            self._log.clear()
        if reported != self._reported or not self.outstanding:
            self._progress_at = time.monotonic()
            self.waits_for = None
        self._reported = reported
        if self.calls:
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        if any(call.round.withdrawn and not call.complete for call in self.calls):
            raise DeliveryHalted("withdrawn")
        if now - max(self._progress_at, self._checked_at) > self._stall_seconds and not self._is_throttled(now):
            self.waits_for = f"{self._topics_prefix()}no acknowledgement for {self._stall_seconds:g} s"
            raise DeliveryStalled(self.waits_for)
        lease_now = lease_clock()
        for call in self.calls:
            self.extend(call, lease_now)
            if lease_now > call.deadline:
                raise DeliveryHalted(f"{self._topics_prefix()}not acknowledged while the lease lasted")

    def extend(self, call: DeliverCall, now: float) -> None:
        """Let ``call`` last for as long as its leases, at the ``lease_clock()`` value ``now``."""
        if not call.has_rows:
            call.extend(self.lease_until)
        elif now > call.deadline - self._stall_seconds:
            call.extend(now + CALL_STALLS * self._stall_seconds)

    def _is_throttled(self, now: float) -> bool:
        """Return True if acknowledgements cannot come yet, because a quota is reached."""
        return now < self._log.throttled_until + self._stall_seconds and bool(self.owing)

    @property
    def owing(self) -> frozenset[int]:
        """Return the ids of connected brokers that have records and have not acknowledged them."""
        return frozenset[int]().union(*(producer.owing for producer in self._producers.values()))

    def may_wait(self, *, answers: bool) -> bool:
        """Return True if the brokers that owe acknowledgements may take longer, and wait for them again.

        With ``answers`` they answer other requests, so only acknowledgements are slow.
        """
        now = time.monotonic()
        if answers:
            self._progress_at = now
        elif now - self._progress_at > SILENT_STALLS * self._stall_seconds:
            return False
        self._checked_at = now
        return True

    def topics(self) -> list[str]:
        """Return the topics of the open calls in alphabetical order."""
        return sorted({topic for call in self.calls for topic in call.topics if topic is not None})

    def _topics_prefix(self) -> str:
        """Return the topics of the open calls as the beginning of a reason."""
        topics = self.topics()
        named = ", ".join(topics[:MAX_NAMED_TOPICS]) + (", …" if len(topics) > MAX_NAMED_TOPICS else "")
        return f"topic {named}: " if topics else ""

    def drain(self) -> None:
        """Wait until every record has its report. Raise ``DeliveryHalted`` as ``serve`` does."""
        while self.outstanding:
            for producer in self._producers.values():
                if producer.fatal is not None:
                    # A failed producer sends no more records, but keeps those of a failed request.
                    producer.purge(in_flight=False)
            self.serve(WAIT_SECONDS)

    def failures(self) -> list[Failure]:
        """Return the failed records in the order in which they were handed over."""
        return sorted((number, index) for number, call in enumerate(self.calls) for index in call.reports.failures)

    def failure(self, number: int, index: int) -> KafkaError:
        """Return the error of a failed record."""
        return self.calls[number].reports.failures[index]

    def retry(self, failures: Sequence[Failure]) -> None:
        """Make failed records pending again, before the other pending events, and clear all failures."""
        for position, call in enumerate(self.calls):
            again = [index for number, index in failures if number == position]
            if again:
                call.set_pending([*again, *call.pending])
            call.reports.failures.clear()

    def describe(self, call: DeliverCall, index: int, error: KafkaError) -> str:
        """Return ``error`` of a record for people."""
        return f"topic {call.topics[index]}: {self._settings.describe(error)}"

    def pop_complete(self) -> DeliverCall | None:
        """Remove and return the first call if it is complete, else return None."""
        if not self.calls or not self.calls[0].complete:
            return None
        call = self.calls.popleft()
        self._reported -= call.reports.count
        return call

    def producer(self, batch_size: int) -> RecordProducer:
        """Return the producer for ``batch_size``, opened if needed.

        Raise ``DeliveryHalted`` if it cannot be opened.
        """
        found = self._producers.get(batch_size)
        if found is not None:
            return found
        try:
            return self.open_producer(batch_size)
        except KafkaException as exception:
            raise DeliveryHalted(self._settings.describe(error_of(exception))) from exception
        except ConfigurationError as reason:
            raise DeliveryHalted(str(reason)) from None

    def open_producer(self, batch_size: int) -> RecordProducer:
        """Open a producer. Raise the client's KafkaException, or ``ConfigurationError``."""
        extra = ONE_AT_A_TIME if batch_size == SINGLE_RECORDS else None
        batch_bytes = batch_size or self._settings.batch_bytes
        producer = RecordProducer(self._settings, self._log, self._format, batch_bytes, extra)
        self._producers[batch_size] = producer
        self._progress_at = time.monotonic()
        return producer

    def batch_sizes(self) -> list[int]:
        """Return the batch sizes of the producers, except that of single records."""
        return [size for size in self._producers if size != SINGLE_RECORDS]

    def close_failed(self) -> None:
        """Close the failed producers with their records."""
        self.close(size for size, producer in list(self._producers.items()) if producer.fatal is not None)

    def close(self, batch_sizes: Iterable[int] | None = None) -> None:
        """Close producers with their records, by default all."""
        for size in list(self._producers) if batch_sizes is None else batch_sizes:
            self._producers.pop(size).close()
        if not self._producers:
            self._log.clear_trouble()

    def purge(self) -> None:
        """Purge and close all producers, and serve their reports: no record can be sent any more."""
        self.waits_for = None
        for producer in self._producers.values():
            producer.purge(in_flight=True)
        deadline = time.monotonic() + PURGE_SECONDS
        while self._producers and self.outstanding and time.monotonic() < deadline:
            for producer in self._producers.values():
                producer.poll(TURN_SECONDS)
        self.close()
