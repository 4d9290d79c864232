"""The event loop's side of the Kafka sink."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from confluent_kafka import KafkaException

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.domain.event import Event
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.formats.topics import TOPICS_MAX
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryRound
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.producer_thread import ProducerThread
from outbox_relay.sinks.kafka.records import RecordFormat, Template, TopicResolver
from outbox_relay.sinks.kafka.statistics import NOTHING, Statistics
from outbox_relay.sinks.kafka.topic_metadata import TopicCreation, check, refuses

T = TypeVar("T")

MAX_BATCH = 4_000
"""Events in one call: a thousand or so already cost no more per event, and this many fit into a few requests."""
MAX_IN_FLIGHT = 2
"""One batch is handed over while the last one is acknowledged."""
CALL_STALLS = 3.0
"""A call ends after this many times ``stall_seconds``, even while acknowledgements keep coming."""
CHECK_SECONDS = 5.0
"""Longest wait of ``check`` for each answer of a broker."""


class KafkaSink:
    """Delivers events to Kafka as ``Sink`` promises: key, payload and headers as they are, one topic per event.

    ``topic`` names an event's topic. ``producer`` goes to librdkafka as it stands, except for what would undo the
    guarantees. When acknowledgements stop for ``stall_seconds`` everything under way is taken back and answered
    ``Unavailable``; a new producer needs up to a second for its first acknowledgement, so two are the least that is
    of use.

    ``Refused`` is answered only for an event that has no topic, cannot be made a record, or fails alone. When the
    template has a field, a topic that is unknown or denied makes only its own events ``Unavailable``, with the topic as
    ``part``; the only topic of a sink is the whole destination.

    ``record_format`` says how events become records, ``creation`` how the sink creates topics if it does. ``files`` hold
    settings of the producer, by name; each is read again whenever a producer is made. With ``hold_keys`` nothing of a key
    is sent after a refused event, in this and in every call under way: it is ``Unavailable`` with ``behind``.
    ``topics`` are the patterns of topics that events may make, and ``topics_max`` how many of them: other events are
    ``Refused``.
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
    ) -> None:
        self.timeout_seconds = CALL_STALLS * stall_seconds
        self._name = name
        self._topics = TopicResolver(topic, topics, topics_max)
        self._settings = ClientSettings(producer, files, creates=creation is not None)
        self._form = record_format or RecordFormat()
        self._creation = creation
        self._stall_seconds = stall_seconds
        self._hold_keys = hold_keys
        self._lane: ProducerThread | None = None
        self._course = DeliveryRound()
        self._number = 0

    @property
    def trouble(self) -> str | None:
        """Why no broker can be reached, as the client last said; None once one answers and without a client."""
        return None if self._lane is None else self._lane.trouble

    @property
    def statistics(self) -> Statistics:
        """What librdkafka counts about the sink's producers, every few seconds (``statistics.interval.ms``)."""
        return NOTHING if self._lane is None else self._lane.statistics

    async def open(self) -> None:
        """Start the thread and the producer, which connects by itself when it can.

        Raises ``Misconfigured`` for settings that librdkafka does not take, and for files that cannot be read.
        """
        if self._lane is not None:
            return
        lane = ProducerThread(
            self._name,
            self._settings,
            self._topics,
            self._stall_seconds,
            self.max_batch,
            self._form,
            self._creation,
            hold_keys=self._hold_keys,
        )
        try:
            await asyncio.to_thread(lane.start)
        except KafkaException as exception:
            raise self._misconfigured(self._settings.describe(error_of(exception)), "producer: ") from None
        except Misconfigured as reason:
            raise self._misconfigured(reason) from None
        self._lane = lane
        self._course = DeliveryRound()

    def validated_settings(self, producer: Mapping[str, Scalar], files: Mapping[str, Path]) -> ClientSettings:
        """Settings that ``renew`` adopts: other ones of the producer, and what its files hold now.

        Blocks for some milliseconds, and raises ``Misconfigured`` as ``open`` does.
        """
        newer = ClientSettings(producer, files, creates=self._creation is not None)
        try:
            RecordProducer(newer, ClientLog(newer), self._form, newer.batch_bytes).close()
        except KafkaException as exception:
            raise self._misconfigured(newer.describe(error_of(exception)), "producer: ") from None
        except Misconfigured as reason:
            raise self._misconfigured(reason) from None
        return newer

    def use_settings(self, newer: ClientSettings) -> None:
        """Deliver with ``newer`` from the next batch on; what is under way is waited for first."""
        if self._lane is None:
            self._settings.adopt(newer)
        else:
            self._lane.put(partial(self._lane.renew, newer))

    def _misconfigured(self, reason: object, place: str = "") -> Misconfigured:
        return Misconfigured(f"sinks.{self._name}.{place}{reason}")

    async def deliver(self, batch: Sequence[Event], until: float, _attempt: int = 1, /) -> Sequence[Verdict]:
        """Deliver as ``Sink.deliver`` says; at most ``max_batch`` events. Raises RuntimeError when not open."""
        lane = self._opened()
        course = self._course = self._course_of_new_call()
        until = min(until, lease_clock() + self.timeout_seconds)
        deadline = time.monotonic() + self.timeout_seconds
        verdicts: asyncio.Future[Sequence[Verdict]] = asyncio.get_running_loop().create_future()
        answer = partial(_answer, verdicts)
        self._number += 1
        todo = range(len(batch))
        call = DeliverCall(self._number, batch, until, deadline, course, answer, lane.reports(), todo)
        course.under_way += 1
        try:
            lane.put(partial(lane.take, call))
            return await verdicts
        finally:
            course.under_way -= 1
            call.returned(self._number)

    def _course_of_new_call(self) -> DeliveryRound:
        course = self._course
        return DeliveryRound() if course.ended is not None and not course.under_way else course

    async def reset(self) -> None:
        """Purge what the producer holds, and return when nothing of it can be sent any more."""
        if self._lane is None:
            return
        await self._withdraw(self._lane)

    async def _withdraw(self, lane: ProducerThread) -> None:
        self._course.ended, self._course.withdrawn = "withdrawn", True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.put(partial(lane.withdraw, partial(_answer, done, None)))
        await done

    async def check(self) -> str | None:
        """Ask for the metadata of the cluster, and of the topic if there is only one; creates no topic.

        Also whether records may be as large as ``message.max.bytes`` of the producer says, if it does.
        """
        creates = self._creation is not None
        return await asyncio.to_thread(check, self._settings, self._topics.constant, CHECK_SECONDS, creates=creates)

    async def payload_size_warning(self, payload_bytes: int) -> str | None:
        """Where an event with a payload so large, which the database lets in, would end dead: what to do about it."""
        return await asyncio.to_thread(refuses, self._settings, self._topics.constant, payload_bytes, CHECK_SECONDS)

    async def close(self) -> None:
        """Purge, end the producer and the thread."""
        if self._lane is None:
            return
        lane, self._lane = self._lane, None
        self._course.ended, self._course.withdrawn = "closed", True
        lane.put(lane.stop)
        await asyncio.to_thread(lane.join)

    def _opened(self) -> ProducerThread:
        if self._lane is None:
            raise RuntimeError(f"sink {self._name} is not open")
        return self._lane


def _answer(future: asyncio.Future[T], result: T) -> None:
    """Give ``result`` to whoever awaits ``future``; called in another thread."""
    # Without a running loop nobody is left who waits.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_resolve, future, result)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
