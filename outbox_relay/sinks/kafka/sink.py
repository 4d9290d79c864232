"""The Kafka sink, as used in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from confluent_kafka import KafkaException

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.file_reading import sink_files
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.formats.topics import TOPICS_MAX
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryRound
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.cluster_check import check, online_warning
from outbox_relay.sinks.kafka.event_schemas import EventSchemas
from outbox_relay.sinks.kafka.in_flight_messages import CALL_STALLS
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.producer_thread import ProducerThread
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.tokens import TokenProvider
from outbox_relay.sinks.kafka.topic_metadata import TopicCreation
from outbox_relay.sinks.kafka.topic_resolver import Template, TopicResolver

T = TypeVar("T")

MAX_BATCH = 4_000
"""Maximum number of events in one call. The cost per event falls up to about 1,000; these fit into a few requests."""
MAX_IN_FLIGHT = 2
"""One batch is handed over while the previous one is being acknowledged."""
CHECK_SECONDS = 5.0
"""Maximum wait of ``check`` for each answer of a broker."""


class KafkaSink:
    """Delivers events to Kafka under the contract of ``Sink``, with payload, key and headers.

    ``topic`` is the template of topics. ``producer`` has settings for librdkafka; those that would break a guarantee
    are overridden. ``files`` contain further settings by name and are read again for every producer.

    When acknowledgements stop for ``stall_seconds``, all records in flight are purged and their events are
    ``Unavailable``. A new producer needs up to a second for its first acknowledgement, so use at least two seconds.
    Acknowledgements that connected brokers owe are waited for while the leases last: for as long as a quota delays
    them or the brokers answer other requests, and otherwise for ``SILENT_STALLS``.

    An event is ``Refused`` only if it has no topic, cannot become a record, or fails alone. If the template has a
    field, an unknown or denied topic makes only its own events ``Unavailable``, with the topic as ``part``. The only
    topic of a sink is its whole destination.

    ``record_format`` has the settings of records, ``creation`` those of created topics, if the sink creates any. With
    ``hold_keys`` no event of a key is sent after a refused one, in this and in all concurrent calls: such events are
    ``Unavailable`` with ``behind``. ``topics`` are patterns of the topics that events may name, and ``topics_max``
    limits their number. Events beyond either are ``Refused``.

    With ``schemas`` the value of a record is the payload in its schema. An event that does not fit is ``Refused``.
    While the registry does not answer, events of unknown schemas are ``Unavailable``.

    ``tokens`` provides the tokens of SASL OAUTHBEARER.

    With ``delivery_details`` the verdict of every delivered event has topic, partition and offset. Otherwise only that
    of an event that has a row has them.
    """

    max_batch = MAX_BATCH
    max_in_flight = MAX_IN_FLIGHT
    keeps_order = True

    def __init__(
        self,
        name: str,
        topic: Template,
        producer: Mapping[str, Scalar],
        stall_seconds: float,
        *,
        record_format: RecordFormat | None = None,
        creation: TopicCreation | None = None,
        files: Mapping[str, Path] | None = None,
        hold_keys: bool = False,
        topics: Sequence[str] = (),
        topics_max: int = TOPICS_MAX,
        delivery_details: bool = False,
        schemas: EventSchemas | None = None,
        tokens: TokenProvider | None = None,
    ) -> None:
        self.timeout_seconds = CALL_STALLS * stall_seconds
        self._name = name
        self._topics = TopicResolver(topic, topics, topics_max)
        self._reader = sink_files(name)
        self._tokens = tokens
        self._settings = self._new_settings(producer, files, creation)
        self._format = record_format or RecordFormat()
        self._creation = creation
        self._stall_seconds = stall_seconds
        self._hold_keys = hold_keys
        self._delivery_details = delivery_details
        self._schemas = schemas
        self._thread: ProducerThread | None = None
        self._round = DeliveryRound()
        self._number = 0
        self._row_calls: set[DeliverCall] = set()

    @property
    def topic(self) -> str:
        """Return the topic, or the template of topics, as the settings have it."""
        return self._topics.text

    @property
    def trouble(self) -> str | None:
        """Return why no broker is reachable, or what delays acknowledgements. None also while the sink is closed."""
        return None if self._thread is None else self._thread.trouble

    async def open(self) -> None:
        """Start the thread and open a producer, which connects by itself.

        Raise ``ConfigurationError`` for settings that librdkafka does not accept, and for files that cannot be used.
        """
        if self._thread is not None:
            return
        thread = ProducerThread(
            self._name,
            self._settings,
            self._topics,
            self._stall_seconds,
            self.max_batch,
            self._format,
            self._creation,
            hold_keys=self._hold_keys,
            schemas=self._schemas,
        )
        try:
            await self._reader.acall(thread.start)
        except KafkaException as exception:
            raise self._misconfigured(self._settings.describe(error_of(exception)), "producer: ") from None
        except ConfigurationError as reason:
            raise self._misconfigured(reason) from None
        self._thread = thread
        self._round = DeliveryRound()

    async def validated_settings(self, producer: Mapping[str, Scalar], files: Mapping[str, Path]) -> ClientSettings:
        """Return settings for ``use_settings``, with the present contents of the files.

        Raise ``ConfigurationError`` as ``open`` does.
        """
        newer = self._new_settings(producer, files, self._creation)

        def make_producer() -> None:
            RecordProducer(newer, ClientLog(newer), self._format, newer.batch_bytes).close()

        try:
            await self._reader.acall(make_producer)
        except KafkaException as exception:
            raise self._misconfigured(newer.describe(error_of(exception)), "producer: ") from None
        except ConfigurationError as reason:
            raise self._misconfigured(reason) from None
        return newer

    def _new_settings(
        self, producer: Mapping[str, Scalar], files: Mapping[str, Path] | None, creation: TopicCreation | None
    ) -> ClientSettings:
        creates = creation is not None
        return ClientSettings(producer, files, creates=creates, reader=self._reader, tokens=self._tokens)

    def use_settings(self, newer: ClientSettings) -> None:
        """Deliver with ``newer`` from the next batch on, after all records in flight have their reports."""
        if self._thread is None:
            self._settings.adopt(newer)
        else:
            self._thread.put(partial(self._thread.use_settings, newer))

    def _misconfigured(self, reason: object, prefix: str = "") -> ConfigurationError:
        return ConfigurationError(f"sinks.{self._name}.{prefix}{reason}")

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver at most ``max_batch`` events as ``Sink.deliver`` does. Raise RuntimeError if the sink is closed."""
        thread = self._open_thread()
        delivery_round = self._round = self._current_round()
        now, has_rows = lease_clock(), attempt > 0
        deadline = now + self.timeout_seconds if has_rows else max(until, now + self._stall_seconds)
        if has_rows and until > now:
            # The lease of a row outlasts the call: ``until`` is the time by which the call should have begun.
            until = deadline
        verdicts: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
        answer = partial(_set_result, verdicts)
        self._number += 1
        with_details = self._delivery_details or has_rows
        call = thread.new_call(
            *(self._number, batch, until, deadline, delivery_round, answer),
            with_details=with_details,
            has_rows=has_rows,
        )
        delivery_round.begin_call()
        if has_rows:
            self._row_calls.add(call)
        try:
            thread.put(partial(thread.take, call))
            return await verdicts
        finally:
            delivery_round.end_call()
            call.returned(self._number)
            self._row_calls.discard(call)

    def extend(self, until: float) -> None:
        """Let calls with events of the log last until the ``lease_clock()`` value ``until``, as ``ExtendsCalls``."""
        if self._thread is not None:
            self._thread.extend(until)

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of calls with rows that last longer than usual, as ``ExtendsDeliveries``."""
        return {
            event.id: call.deadline + self._stall_seconds
            for call in self._row_calls
            if call.extended
            for event in call.batch
        }

    def _current_round(self) -> DeliveryRound:
        current = self._round
        return DeliveryRound() if current.end_reason is not None and not current.open_calls else current

    async def reset(self) -> None:
        """Purge all records, and return when none of them can be sent any more."""
        thread = self._thread
        if thread is None:
            return
        self._round.end("withdrawn", withdraw=True)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        thread.put(partial(thread.withdraw, partial(_set_result, done, None)))
        await done

    async def check(self) -> str | None:
        """Return why the cluster would not accept events now, or None. Creates no topic.

        Checks the metadata of the cluster, those of the topic if there is only one, and the user's limit for records,
        then the schema registry and the subjects of the types that the settings name.
        """
        creates, topic = self._creation is not None, self._topics.constant
        problem = await asyncio.to_thread(check, self._settings, topic, CHECK_SECONDS, creates=creates)
        if problem is not None or self._schemas is None:
            return problem
        return await asyncio.to_thread(self._schemas.check, self._topics.of_type, CHECK_SECONDS)

    async def online_warning(self, payload_bytes: int | None) -> str | None:
        """Return a warning if the topic is missing, or if events with payloads of ``payload_bytes`` would end dead."""
        creates, topic = self._creation is not None, self._topics.constant
        return await asyncio.to_thread(
            online_warning, self._settings, topic, payload_bytes, CHECK_SECONDS, creates=creates
        )

    async def close(self) -> None:
        """Purge all records and end the thread."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._round.end("closed", withdraw=True)
        thread.put(thread.stop)
        await asyncio.to_thread(thread.join)

    def _open_thread(self) -> ProducerThread:
        if self._thread is None:
            raise RuntimeError(f"sink {self._name} is not open")
        return self._thread


def _set_result(future: asyncio.Future[T], result: T) -> None:
    """Set the result of ``future`` from another thread."""
    # Without a running loop no caller is left.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_resolve, future, result)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
