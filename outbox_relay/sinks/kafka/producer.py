"""One producer: records are put on it in order, and it says which failed. Used by one thread only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import LINGER_MS, ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard
from outbox_relay.sinks.kafka.records import ANY_PARTITION, Headers, RecordFormat, passed_on
from outbox_relay.sinks.kafka.statistics import NOTHING, Statistics

_NOW = 0


class RecordProducer:
    """A librdkafka producer whose delivery reports are served only by :meth:`poll` and :meth:`hurry`.

    ``flush`` is never called without a limit: a fatal error may never let it return.
    Raises KafkaException when the client does not take its settings.
    """

    def __init__(
        self,
        settings: ClientSettings,
        log: ClientLog,
        form: RecordFormat,
        batch_bytes: int,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.fatal: str | None = None
        """The error after which this producer is dead."""
        self.opening: NewProducerGuard | None = None if extra else NewProducerGuard()
        """What may go out while it is new; nothing where records are sent alone."""
        self.statistics: Statistics = NOTHING
        """As of the client's last report."""
        self._handed_over_at = -math.inf
        self._settings = settings
        self._log = log
        self._form = None if form.plain else form
        callbacks = {"error_cb": log.unreachable, "stats_cb": self._counted}
        config = {**settings.producer(batch_bytes, extra or {}), **callbacks}
        self._producer = Producer(config, logger=log)

    def put(self, call: DeliverCall, places: Sequence[int]) -> int:
        """Hand the events at ``places`` to the client; returns how many of them are dealt with.

        Fewer than given when the client's queue is full or the producer is dead, and after a refused event that holds
        its key. An event that can never be a record is judged at once.
        """
        batch, topics, callbacks, produce = call.batch, call.topics, call.reports.callbacks, self._producer.produce
        form, holds, over = self._form, call.holding is not None, False
        dealt = sent = 0
        for place in places:
            topic = topics[place]
            if topic is not None:
                _, _, uid, kind_of_event, key, payload, content_type, own = batch[place][:8]
                value: bytes | None = payload
                partition = ANY_PARTITION
                headers: Headers = [("id", uid), ("type", kind_of_event), ("content-type", content_type)]
                try:
                    if form is not None:
                        value, partition, headers = form.record(batch[place])
                    elif own is not None:
                        headers += passed_on(own_headers(own))
                    produce(topic, value, key, partition, callbacks[place], None, _NOW, headers)
                    sent += 1
                except BufferError:
                    break
                except KafkaException as exception:
                    if not self._not_taken(call, place, error_of(exception)):
                        break
                    over = holds
                except Exception as exception:
                    # One event must not end what all others share.
                    call.refuse(place, f"cannot be made a Kafka record: {_harmless(exception)}")
                    over = holds
            dealt += 1
            if over:
                break
        call.sent += sent
        self._handed_over_at = time.monotonic() if sent else self._handed_over_at
        return dealt

    def _not_taken(self, call: DeliverCall, place: int, error: KafkaError) -> bool:
        """Note that the client refused an event; returns False when it refuses everything from now on."""
        match error_kind(error):
            case ErrorKind.FATAL:
                self.fatal = self.fatal or self._settings.describe(error)
                return False
            case ErrorKind.MESSAGE:
                call.refuse(place, self._settings.describe(error))
            case _:
                call.reports.failures[place] = error
        return True

    def _counted(self, text: str) -> None:
        self.statistics = Statistics.of(text)
        if self.statistics.brokers_up:
            self._log.forget()

    def poll(self, seconds: float) -> None:
        """Serve the reports that are there; when there is none, wait up to ``seconds`` for one. Blocks."""
        self._serve(self._producer.poll, seconds)

    def hurry(self, seconds: float) -> None:
        """Serve reports until none is to come, or for ``seconds``; no record waits for company meanwhile. Blocks.

        Nothing waits any more once ``LINGER_MS`` have passed since the last record was handed over. From then on this
        is a :meth:`poll`: flushing keeps the client's thread busy for as long as a request is under way.
        """
        lingers = self._settings.hurries and time.monotonic() < self._handed_over_at + LINGER_MS / 1000
        self._serve(self._producer.flush if lingers else self._producer.poll, seconds)

    def _serve(self, serve: Callable[[float], object], seconds: float) -> None:
        try:
            serve(seconds)
        except KafkaException as exception:
            self.fatal = self.fatal or self._settings.describe(error_of(exception))
        except SystemError as exception:
            self.fatal = self.fatal or f"the client broke: {type(exception).__name__}"

    def purge(self, *, in_flight: bool) -> None:
        """Take back what was handed over and not sent, and with ``in_flight`` what was sent and not acknowledged.

        The reports say so and must still be served.
        """
        try:
            # The binding inverts this flag: with True it does not wait for the purge of the queues.
            self._producer.purge(in_queue=True, in_flight=in_flight, blocking=False)
        except KafkaException as exception:
            self.fatal = self.fatal or self._settings.describe(error_of(exception))

    def close(self) -> None:
        """Destroy the producer, and with it whatever it still holds. Blocks for some milliseconds."""
        # The last reference: its deallocation ends the client, without the flush of its close().
        self._producer = cast("Producer", None)


def _harmless(exception: Exception) -> str:
    """Return what went wrong, without any part of the event: messages of libraries may quote it."""
    return str(exception) if type(exception) in (ValueError, TypeError) else type(exception).__name__
