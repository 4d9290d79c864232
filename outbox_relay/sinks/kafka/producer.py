"""One librdkafka producer. Used by one thread only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_relay.domain.file_reading import while_reading
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import LINGER_MS, ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.encoded_records import EncodedRecords
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard
from outbox_relay.sinks.kafka.records import ANY_PARTITION, Headers, RecordFormat, without_reserved
from outbox_relay.sinks.kafka.statistics import connections

_NOW = 0


class RecordProducer:
    """A librdkafka producer. Only :meth:`poll` and :meth:`flush_for` serve its delivery reports.

    ``flush`` is never called without a limit: after a fatal error it may never return. Raises KafkaException for
    settings that the client does not accept.
    """

    def __init__(
        self,
        settings: ClientSettings,
        log: ClientLog,
        record_format: RecordFormat,
        batch_bytes: int,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.fatal: str | None = None
        """The error after which the producer is unusable, or None."""
        self.guard: NewProducerGuard | None = None if extra else NewProducerGuard()
        """Limits the first records. None where records are sent alone."""
        self.owing: frozenset[int] = frozenset()
        """The ids of connected brokers that have records and have not acknowledged them, at most a second ago."""
        self._handed_over_at = -math.inf
        self._settings = settings
        self._log = log
        self._format = None if record_format.plain else record_format
        callbacks = {"error_cb": log.unreachable, "stats_cb": self._take_statistics, "throttle_cb": log.throttled}

        def make() -> Producer:
            config = {**settings.producer(batch_bytes, extra or {}), **callbacks}
            with while_reading("producer"):
                return Producer(config, logger=log)

        self._producer = settings.reader.call(make)

    def put(self, call: DeliverCall, indexes: Sequence[int]) -> int:
        """Hand events to the client and return how many of ``indexes`` are dealt with.

        Fewer than given if the client's queue is full or the producer failed, and after a refused event that holds its
        key. An event that cannot become a record is refused at once.
        """
        batch, topics, callbacks, produce = call.batch, call.topics, call.reports.callbacks, self._producer.produce
        records = EncodedRecords(self._format, call, indexes) if call.encoders else self._format
        stops, refused = call.refusal_blocks is not None, False
        dealt = sent = 0
        for index in indexes:
            topic = topics[index]
            if topic is not None:
                _, _, uid, event_type, key, payload, content_type, own = batch[index][:8]
                value: bytes | None = payload
                partition = ANY_PARTITION
                headers: Headers = [("id", uid), ("type", event_type), ("content-type", content_type)]
                try:
                    if records is not None:
                        value, partition, headers = records.record(batch[index])
                    elif own is not None:
                        headers += without_reserved(own_headers(own))
                    produce(topic, value, key, partition, callbacks[index], None, _NOW, headers)
                    sent += 1
                except BufferError:
                    break
                except KafkaException as exception:
                    if not self._take_refusal(call, index, error_of(exception)):
                        break
                    refused = True
                except Exception as exception:
                    # One event must not end the calls of all others.
                    call.refuse(index, f"cannot be made a Kafka record: {_without_values(exception)}")
                    refused = True
            dealt += 1
            if refused and stops:
                break
        call.count_handed_over(sent)
        self._handed_over_at = time.monotonic() if sent else self._handed_over_at
        return dealt

    def _take_refusal(self, call: DeliverCall, index: int, error: KafkaError) -> bool:
        """Record that the client refused an event. Return False if it refuses all events from now on."""
        match error_kind(error):
            case ErrorKind.FATAL:
                self._fail(self._settings.describe(error))
                return False
            case ErrorKind.MESSAGE:
                call.refuse(index, self._settings.describe(error))
            case _:
                call.reports.failures[index] = error
        return True

    def _take_statistics(self, report: str) -> None:
        found = connections(report)
        self.owing = found.owing
        if found.up:
            self._log.clear_trouble()

    def _fail(self, reason: str) -> None:
        self.fatal = self.fatal or reason

    def poll(self, seconds: float) -> None:
        """Serve the available reports, or wait up to ``seconds`` for one. Blocks."""
        self._serve(self._producer.poll, seconds)

    def flush_for(self, seconds: float) -> None:
        """Serve reports for up to ``seconds``, without letting records linger. Blocks.

        No record lingers once ``LINGER_MS`` have passed since the last one was handed over. From then on this is a
        :meth:`poll`, because flushing keeps the client's thread busy while a request is in flight.
        """
        lingers = self._settings.flushes_early and time.monotonic() < self._handed_over_at + LINGER_MS / 1000
        self._serve(self._producer.flush if lingers else self._producer.poll, seconds)

    def _serve(self, serve: Callable[[float], object], seconds: float) -> None:
        try:
            serve(seconds)
        except KafkaException as exception:
            self._fail(self._settings.describe(error_of(exception)))
        except SystemError as exception:
            self._fail(f"the client failed: {type(exception).__name__}")

    def purge(self, *, in_flight: bool) -> None:
        """Purge the unsent records, and with ``in_flight`` those that were sent and not acknowledged.

        Their delivery reports must still be served.
        """
        try:
            # The binding inverts this flag: with True it does not wait until the queues are purged.
            self._producer.purge(in_queue=True, in_flight=in_flight, blocking=False)
        except KafkaException as exception:
            self._fail(self._settings.describe(error_of(exception)))

    def close(self) -> None:
        """Destroy the producer with all records that it still has. Blocks for some milliseconds."""
        # Releases the last reference: deallocation ends the client without the flush of its close().
        self._producer = cast("Producer", None)


def _without_values(exception: Exception) -> str:
    """Return a description without parts of the event, which messages of libraries may contain."""
    return str(exception) if type(exception) in (ValueError, TypeError) else type(exception).__name__
