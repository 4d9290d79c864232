"""Recovery from failed requests and from stalls that single topics cause."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from confluent_kafka import KafkaException

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.cluster_queries import (
    MIN_SECONDS,
    ClusterUnavailable,
    admin_client,
    cluster_metadata,
    silent_brokers,
)
from outbox_relay.sinks.kafka.context import LATE, ThreadContext
from outbox_relay.sinks.kafka.errors import TOO_LARGE, ErrorKind, error_kind
from outbox_relay.sinks.kafka.in_flight_messages import SINGLE_RECORDS, DeliveryHalted, Failure

STALL_REQUEST_SECONDS = 1.0
"""Timeout of the request for the topics of unacknowledged records."""
MAX_STALL_TOPICS = 50
"""Maximum number of topics requested after a stall."""


class FailureRecovery:
    """Finds the records and topics at fault, and makes the other records pending again."""

    def __init__(self, context: ThreadContext) -> None:
        self._context = context
        self._in_flight = context.in_flight
        self._has_one_topic = context.topics.constant is not None

    def recover(self) -> None:
        """Recover from failed records or producers. Raise ``DeliveryHalted`` if the destination is at fault.

        The failed records up to the last suspect are sent again alone. The later ones are handed over again before any
        other event.
        """
        in_flight = self._in_flight
        self._causes()
        in_flight.drain()
        suspects, topics = self._causes()
        if not suspects and not topics:
            raise DeliveryHalted(in_flight.fatal or "Kafka's client returned records")
        failures = in_flight.failures()
        in_flight.close_failed()
        for topic, reason in topics.items():
            self._open_breaker(topic, reason)
        alone = [failure for failure in failures if suspects and failure <= suspects[-1]]
        self._send_alone(alone)
        in_flight.retry(failures[len(alone) :])

    def recover_from_stall(self) -> bool:
        """Return True if a stall is no outage.

        Brokers that owe acknowledgements are waited for. If topics caused the stall, their breakers are open, and all
        records pending again.
        """
        in_flight = self._in_flight
        if owing := in_flight.owing:
            return in_flight.may_wait(answers=self._answer(owing))
        topics = in_flight.topics()
        if self._has_one_topic or len(topics) > MAX_STALL_TOPICS:
            return False
        try:
            refused = self._context.metadata.load(topics, STALL_REQUEST_SECONDS, patient=False)
        except (ClusterUnavailable, ConfigurationError, KafkaException):
            return False
        if not refused:
            return False
        for topic, reason in refused.items():
            self._open_breaker(topic, reason)
        in_flight.purge()
        if in_flight.outstanding:
            return False
        in_flight.retry(in_flight.failures())
        return True

    def _answer(self, brokers: Collection[int]) -> bool:
        """Return True if ``brokers`` answer a request on another connection."""
        context, deadline = self._context, time.monotonic() + STALL_REQUEST_SECONDS
        try:
            admin = admin_client(context.settings, context.log, create_topics=False)
            cluster_metadata(admin, context.log, None, deadline)
            return not silent_brokers(admin, brokers, max(deadline - time.monotonic(), MIN_SECONDS))
        except (ClusterUnavailable, ConfigurationError, KafkaException):
            return False

    def _causes(self) -> tuple[list[Failure], dict[str, str]]:
        """Return the failed records that may be at fault, and the topics at fault with the reasons.

        Records that failed because of their producer are neither: another record is the cause. Raise
        ``DeliveryHalted`` if the destination is at fault.
        """
        suspects: list[Failure] = []
        topics: dict[str, str] = {}
        for number, index in self._in_flight.failures():
            call, error = self._in_flight.calls[number], self._in_flight.failure(number, index)
            match self._kind(call, index):
                case ErrorKind.MESSAGE:
                    suspects.append((number, index))
                case ErrorKind.TOPIC:
                    topics[call.topics[index] or ""] = self._in_flight.describe(call, index, error)
                case ErrorKind.DESTINATION:
                    raise DeliveryHalted(self._in_flight.describe(call, index, error))
                case _:
                    pass
        return suspects, topics

    def _kind(self, call: DeliverCall, index: int) -> ErrorKind:
        """Return the kind of a failure. The only topic of a sink is its whole destination."""
        kind = error_kind(call.reports.failures[index])
        return ErrorKind.DESTINATION if kind is ErrorKind.TOPIC and self._has_one_topic else kind

    def _open_breaker(self, topic: str, reason: str) -> None:
        self._context.send_filter.open_breaker(topic, reason, self._in_flight.calls)

    def _send_alone(self, failures: Sequence[Failure]) -> None:
        """Send failed records again in order, each alone, and refuse those that fail again."""
        in_flight, calls = self._in_flight, self._in_flight.calls
        too_large = [failure for failure in failures if in_flight.failure(*failure).name() in TOO_LARGE]
        for number, index in failures:
            if self._context.send_filter.sendable(calls[number], (index,)):
                self._send_record(calls[number], index)
            else:
                del calls[number].reports.failures[index]
        # A record that is accepted alone was in a batch that is too large for its topic.
        accepted = [(number, index) for number, index in too_large if index not in calls[number].decided]
        for topic in {calls[number].topics[index] for number, index in accepted}:
            self._context.metadata.reduce_batch_size(topic or "")

    def _send_record(self, call: DeliverCall, index: int) -> None:
        """Send one record and wait for its report. Raise ``DeliveryHalted`` if the destination fails."""
        if lease_clock() >= call.until:
            raise DeliveryHalted(LATE)
        failures, producer = call.reports.failures, self._in_flight.producer(SINGLE_RECORDS)
        del failures[index]
        if not producer.put(call, (index,)):
            call.abandon(index)
            late = LATE if lease_clock() >= call.until else None
            raise DeliveryHalted(producer.fatal or late or "Kafka's client has no space for a single record")
        self._in_flight.drain()
        if index in failures:
            self._judge(call, index)
            del failures[index]

    def _judge(self, call: DeliverCall, index: int) -> None:
        """Decide the verdict on a record that failed alone."""
        context = self._context
        reason = self._in_flight.describe(call, index, call.reports.failures[index])
        match self._kind(call, index):
            case ErrorKind.MESSAGE:
                call.refuse(index, reason)
            case ErrorKind.TOPIC:
                topic = call.topics[index] or ""
                self._open_breaker(topic, reason)
                context.send_filter.hold_back(call, index, context.breakers.verdict(topic, time.monotonic()))
            case _:
                raise DeliveryHalted(reason)
