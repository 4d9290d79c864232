"""The steps between taking a call and handing over its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from confluent_kafka import KafkaException

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.event import PAYLOAD
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Refused, Unavailable
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import error_of
from outbox_relay.sinks.kafka.cluster_queries import ClusterUnavailable
from outbox_relay.sinks.kafka.context import LATE, ThreadContext
from outbox_relay.sinks.kafka.event_schemas import SchemasUnavailable
from outbox_relay.sinks.kafka.in_flight_messages import SINGLE_RECORDS
from outbox_relay.sinks.kafka.topic_admission import TopicAdmission
from outbox_relay.sinks.kafka.topic_metadata import MAX_TOPICS


class CallPreparation:
    """Reads the metadata of a call's topics, refuses impossible events, and chooses the producers."""

    def __init__(self, context: ThreadContext) -> None:
        self._context = context
        self._topics = context.topics
        self._metadata = context.metadata
        self._in_flight = context.in_flight
        self._admission = TopicAdmission(context.topics.max_topics, context.topics.named)
        self._assigned_sizes: dict[str, int] = {}

    def reset(self) -> None:
        """Discard what may have changed since the producers were opened."""
        self._metadata.clear()
        self._assigned_sizes.clear()

    def prepare(self, call: DeliverCall) -> bool:
        """Prepare ``call``. Return False if its events cannot be handed over now."""
        context, now = self._context, lease_clock()
        self._in_flight.extend(call, now)
        if now >= call.until:
            return self._end_round(call, LATE)
        if not call.topics:
            call.set_topics(self._topics.resolve(call.batch, call.refuse))
        constant = self._topics.constant
        topics = [constant] if constant is not None else sorted({topic for topic in call.topics if topic is not None})
        if not self._load_metadata(call, topics):
            return False
        if len(context.breakers) or len(context.blocks):
            context.send_filter.filter_pending(call)
        # The topics left out have open breakers, so none of their events is pending.
        known = [topic for topic in topics if not self._metadata.unknown((topic,))]
        if not self._choose_producers(call, known):
            return False
        if not self._assign_encoders(call):
            return False
        self._refuse_too_large(call, known)
        self._refuse_missing_partitions(call)
        if call.refusal_blocks is not None and len(call.refusal_blocks):
            context.send_filter.filter_pending(call)
        return True

    def _end_round(self, call: DeliverCall, reason: str) -> bool:
        call.end_round(self._context.log.explain(reason))
        return False

    def _load_metadata(self, call: DeliverCall, topics: list[str]) -> bool:
        """Request unknown topics. End the round and return False if the cluster does not answer."""
        breakers, now = self._context.breakers, time.monotonic()
        unknown = [topic for topic in self._metadata.unknown(topics) if breakers.may_request(topic, now)]
        if not unknown:
            return True
        try:
            refused = self._request(call, unknown)
        except (ClusterUnavailable, ConfigurationError) as reason:
            self._end_round(call, str(reason))
            if not self._in_flight.outstanding:
                # Producers opened again read the files with secrets again.
                self._in_flight.close()
            return False
        except KafkaException as exception:
            return self._end_round(call, self._context.settings.describe(error_of(exception)))
        if refused and self._topics.constant is not None:
            return self._end_round(call, next(iter(refused.values())))
        for topic, reason in refused.items():
            breakers.open(topic, reason, time.monotonic())
        return True

    def _request(self, call: DeliverCall, unknown: list[str]) -> Mapping[str, str]:
        """Request metadata of the admitted topics and return the reasons for those without."""
        seconds = min(self._context.stall_seconds, call.until - lease_clock())

        def cancelled() -> bool:
            return call.round.withdrawn

        admitted = self._admit(call, unknown, partial(self._metadata.existing, seconds, cancelled))
        if not admitted:
            return {}
        patient = any(topic not in self._context.breakers for topic in admitted)
        return self._metadata.load(admitted, seconds, patient=patient, cancelled=cancelled)

    def _admit(self, call: DeliverCall, topics: list[str], existing: Callable[[], Collection[str]]) -> list[str]:
        """Return the admitted ones of ``topics``, and refuse the events of the others.

        Raise ``ClusterUnavailable`` if the cluster does not answer.
        """
        if self._topics.constant is not None:
            return topics
        refused = self._admission.refused(topics, existing)
        if refused:
            for index in call.pending:
                if (topic := call.topics[index]) in refused:
                    call.refuse_unsent(index, refused[topic])
        return [topic for topic in topics if topic not in refused]

    def _assign_encoders(self, call: DeliverCall) -> bool:
        """Choose the encoder of each event. End the round and return False if the registry gives none to the sink."""
        schemas, context = self._context.schemas, self._context
        if schemas is None:
            return True
        seconds = min(context.stall_seconds, call.until - lease_clock())
        try:
            without = schemas.assign(call, seconds)
        except SchemasUnavailable as reason:
            return self._end_round(call, str(reason))
        for index, verdict in without.items():
            if isinstance(verdict, Refused):
                call.refuse_unsent(index, verdict.reason)
            elif verdict.part is not None:
                context.send_filter.hold_back(call, index, verdict)
        if without:
            call.set_pending([i for i in call.pending if call.topics[i] is not None and i not in call.decided])
            context.send_filter.filter_pending(call)
        reason = next(
            (each.reason for each in without.values() if isinstance(each, Unavailable) and not each.part), None
        )
        return True if reason is None else self._end_round(call, reason)

    def _choose_producers(self, call: DeliverCall, topics: list[str]) -> bool:
        """Choose the producer of each event. Return False if a record fails while a topic changes its producer."""
        metadata, assigned = self._metadata, self._assigned_sizes
        sizes = {topic: metadata.batch_size(topic) for topic in topics}
        if any(assigned.get(topic, size) != size for topic, size in sizes.items()) or len(assigned) > MAX_TOPICS:
            self._in_flight.drain()
            if self._in_flight.failed:
                return False
            assigned.clear()
        assigned.update(sizes)
        distinct = set(sizes.values())
        if call.probes or len(distinct) > 1:
            call.set_batch_sizes(self._size_of_each(call, sizes))
        else:
            call.set_batch_sizes(next(iter(distinct), metadata.max_batch_bytes))
        idle = [size for size in self._in_flight.batch_sizes() if not metadata.in_use(size) and size not in distinct]
        if idle and not self._in_flight.outstanding:
            self._in_flight.close(idle)
        return True

    def _size_of_each(self, call: DeliverCall, sizes: Mapping[str, int]) -> Sequence[int]:
        # A failed probe must not end a producer that other records use.
        probes = set(call.probes.values())
        return [
            SINGLE_RECORDS if index in probes else sizes.get(topic or "", self._metadata.max_batch_bytes)
            for index, topic in enumerate(call.topics)
        ]

    def _refuse_too_large(self, call: DeliverCall, topics: list[str]) -> None:
        """Refuse the events whose payload exceeds the known limit of their topic, unless their records are smaller."""
        limits = {topic: limit for topic in topics if (limit := self._metadata.max_message_bytes(topic)) is not None}
        if self._context.settings.compresses or self._context.schemas is not None or not limits:
            return
        lowest = min(limits.values())
        if max(map(len, map(PAYLOAD, call.batch))) <= lowest:
            return
        for index in [index for index in call.pending if len(call.batch[index].payload) > lowest]:
            topic, size = call.topics[index], len(call.batch[index].payload)
            if topic in limits and size > limits[topic]:
                self._metadata.refresh(topic, self._context.stall_seconds)
                limits[topic] = limit = self._metadata.max_message_bytes(topic) or size
                if size > limit:
                    reason = f"topic {topic}: MSG_SIZE_TOO_LARGE: {size} bytes, the topic takes at most {limit}"
                    call.refuse_unsent(index, reason)

    def _refuse_missing_partitions(self, call: DeliverCall) -> None:
        """Refuse the events whose header names no partition of their topic."""
        if self._context.record_format.partition_header is None:
            return
        for index in call.pending:
            topic = call.topics[index]
            if topic is None:
                continue
            try:
                partition = self._context.record_format.partition(own_headers(call.batch[index].headers))
            except ValueError as reason:
                call.refuse_unsent(index, str(reason))
                continue
            if partition < self._metadata.partitions(topic):
                continue
            self._metadata.refresh(topic, self._context.stall_seconds)
            count = self._metadata.partitions(topic)
            if partition >= count:
                reason = f"topic {topic}: there is no partition {partition}, there are {count}, counted from 0"
                call.refuse_unsent(index, reason)
