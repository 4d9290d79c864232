"""The Kafka sink. It hands events over to librdkafka and takes its reports, in the thread of the sink's loop.

These rules keep the order and lose nothing:

- librdkafka never gives up a record by itself. When acknowledgements stop, all records are purged, all reports are
  served, and the producer is replaced. Unacknowledged events are ``Unavailable``, so the acknowledged records are a
  prefix per partition.
- A request that fails for good ends the producer (``enable.gapless.guarantee``), so no later record overtakes. A new
  producer begins with one event of each key (``NewProducerGuard``). The events in flight are sent again in order, up to
  the last suspect one at a time, by a producer that sends single records. Only an event that fails alone is
  ``Refused``. A producer is replaced when all its records have reports.
- A topic that accepts no events does not hold back other topics. Except for occasional probes its events are
  ``Unavailable`` without being sent.
- A call ends after all earlier ones. In its verdicts no delivered event follows an unavailable one of its key.
- Where dead letters hold their key, no event of the key is handed over after a refused event. Records that failed in
  the same request, or after it, are sent again only when the refused one is known: by then its key is blocked.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from confluent_kafka import KafkaError, KafkaException, Message

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.formats.headers import own_headers
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.calls import Call, Sink
from outbox_relay.sinks.kafka.checks import Cluster, ClusterCheck, ClusterUnavailable
from outbox_relay.sinks.kafka.errors import ErrorKind, error_kind, error_of
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import ANY_PARTITION, CONTENT_TYPE, Headers, RecordFormat, without_reserved
from outbox_relay.sinks.kafka.settings import ClientLog, ClientSettings, Scalar, TokenProvider, TokenUnavailable
from outbox_relay.sinks.kafka.topics import TopicCreation, TopicMetadata, TopicResolver, TopicTroubles

if TYPE_CHECKING:
    from outbox_relay.settings import KafkaSettings
    from outbox_relay.sinks.kafka.schemas import EventSchemas, Serializer

MAX_BATCH = 4_000
"""Maximum number of events in one call. The cost per event falls up to about 1,000; these fit into a few requests."""
MAX_IN_FLIGHT = 2
"""One batch is handed over while the previous one is being acknowledged."""
CHECK_EVERY = 100
"""Number of events handed over between two checks of the clock and the reports."""
RUN_SECONDS = 0.05
"""Time of handing over after which the loop gets its turn: some encoders are slow."""
SERVE_SECONDS = 0.001
"""One wait for reports while calls are open."""
IDLE_SECONDS = 0.5
"""Time between two rounds of serving errors and log lines of the client while no call is open."""
SILENT_STALLS = 2.5
"""Maximum wait, in multiples of ``stall_seconds``, for a connected broker that owes acknowledgements and is silent."""
CALL_STALLS = 3.0
"""Usual maximum duration of a call in multiples of ``stall_seconds``, and each further time of calls with rows."""
PURGE_SECONDS = 5.0
"""Maximum wait for the reports of purged records. They need no broker, so they come at once."""
STALL_REQUEST_SECONDS = 1.0
"""Time for requests that find out if brokers answer."""
CHECK_SECONDS = 5.0
"""Maximum wait of ``check`` for each answer of a broker."""
BEHIND = Unavailable("an earlier event of its key was refused, and dead letters hold their key", behind=True)
"""The verdict on events that are not sent for that reason."""
STALL_MIN_SECONDS = 3.0
"""Minimum silence of a broker that counts as a stall; with a longer lease, a third of that."""
LATE = Unavailable("not handed to Kafka's client in time", behind=True, untouched=True)
"""The verdict of events that are left when their lease is over, which says nothing about the destination."""

_NOW = 0


class DeliveryHalted(Exception):
    """No event can be delivered now, so everything in flight is purged. The message is the reason."""


class LeaseOver(Exception):
    """Nothing more may be sent, because a lease is over."""


class Delivery:
    """One call. Once it has ended, the object serves another one.

    There is one callback per index, created once, so a delivery report allocates nothing.
    """

    def __init__(self, max_batch: int) -> None:
        self.callbacks: Sequence[Callable[[KafkaError | None, object], None]] = [
            partial(self._report, index) for index in range(max_batch)
        ]

    def begin(
        self, call: Call, number: int, deadline: float, earlier: Sequence[Mapping[str, object]], *, details: bool
    ) -> None:
        """Begin ``call`` while the calls with the blocked keys ``earlier`` are open. Numbers rise.

        With ``details`` the verdicts have those of Kafka.
        """
        self.call, self.events, self.number = call, call.events, number
        self.has_rows = call.attempt > 0
        self.deadline = deadline
        """A ``lease_clock()`` value from which on no record is waited for."""
        self.until = call.until
        """A ``lease_clock()`` value from which on no event is handed over."""
        self.extended = False
        """True if the call lasts longer than it should have."""
        self.pending: Sequence[int] = range(len(self.events))
        """Indexes of the events that are still to be handed over, in order."""
        self.prepared = False
        """True if topics and serializers of the pending events are known."""
        self.topics: list[str] = []
        self.serializers: dict[int, Serializer] = {}
        """By index; empty for a sink without a schema registry."""
        self.probes: dict[str, int] = {}
        """For each probed topic the index of the event that probes it."""
        self.decided: dict[int, Verdict] = {}
        """Verdicts other than delivered, by index."""
        self.blocked: dict[str, tuple[int, Unavailable]] = {}
        """By key the index of the first event of this call that blocks it, and the verdict of those behind it."""
        self.earlier = cast("Sequence[Mapping[str, tuple[int, Unavailable]]]", earlier)
        self.handed_over = 0
        """Number of records handed over. A record that is sent again counts again."""
        self.reported = 0
        self.failures: dict[int, KafkaError] = {}
        self.acknowledgements: dict[int, Verdict] | None = {} if details else None
        """Verdicts with partition and offset by index; None unless they are collected."""
        self.partitions: set[tuple[str, int]] | None = None
        """Takes topic and partition of acknowledged records, or None."""
        self.collects = details

    @property
    def outstanding(self) -> int:
        """Return the number of records without a delivery report."""
        return self.handed_over - self.reported

    @property
    def complete(self) -> bool:
        """Return True if every event has its verdict."""
        return not self.pending and self.handed_over == self.reported and not self.failures

    def _report(self, index: int, error: KafkaError | None, record: object) -> None:
        self.reported += 1
        if error is not None:
            self.failures[index] = error
        elif self.collects:
            self._collect(index, cast("Message", record))

    def _collect(self, index: int, message: Message) -> None:
        topic, partition = message.topic() or "", message.partition() or 0
        if self.partitions is not None:
            self.partitions.add((topic, partition))
        if self.acknowledgements is not None:
            detail = {"topic": topic, "partition": partition, "offset": message.offset() or 0}
            self.acknowledgements[index] = Delivered(seconds=message.latency(), detail=detail)

    def extend(self, until: float) -> None:
        """Let the call last until the ``lease_clock()`` value ``until``, if that is later than before."""
        if until > self.deadline:
            self.deadline, self.extended = until, True
            self.until = max(self.until, until)

    def block(self, index: int, verdict: Unavailable) -> None:
        """Make the events of its key behind the one at ``index`` unavailable, in this call and those that overlap."""
        key = self.events[index].key
        if key is not None and index < self.blocked.get(key, (math.inf,))[0]:
            self.blocked[key] = index, verdict

    def blocking(self, index: int) -> Unavailable | None:
        """Return the verdict of the event at ``index`` if an earlier one blocks its key, or None."""
        key = self.events[index].key
        if key is None:
            return None
        for blocked in self.earlier:
            if key in blocked:
                return blocked[key][1]
        place, verdict = self.blocked.get(key, (index, None))
        return verdict if place < index else None

    def abandon(self, verdict: Unavailable, *, purged: bool) -> None:
        """Make every event unavailable that is pending or failed. After a purge no report is waited for."""
        if purged and self.outstanding:  # it is not known which records were acknowledged
            self.pending, self.handed_over = range(len(self.events)), self.reported
        self.decided.update(dict.fromkeys((*self.pending, *self.failures), verdict))
        self.pending, self.failures = (), {}

    def end(self) -> Call:
        """End the call and return it. Events after an unavailable one of their key are unavailable too.

        That holds even for acknowledged records. After a refused event that holds its key, acknowledged records of
        other topics stay delivered.
        """
        call, decided, acknowledged = self.call, self.decided, self.acknowledgements
        if not decided and acknowledged is None and not any(self.earlier):
            call.end(None)
        else:
            verdicts = [decided.get(i) or (acknowledged or {}).get(i, DELIVERED) for i in range(len(self.events))]
            for index, found in enumerate(verdicts):
                blocked = self.blocking(index)
                verdict = found if blocked is None or (blocked is BEHIND and isinstance(found, Delivered)) else blocked
                verdicts[index] = verdict
                if isinstance(verdict, Unavailable):
                    self.block(index, verdict)
            call.end(verdicts)
        del self.call, self.events
        return call


class KafkaSink(Sink):
    """Delivers events to Kafka, with payload, key and headers.

    ``topic`` is the template of topics. ``producer`` has settings for librdkafka; those that would break a guarantee
    are overridden. ``secrets`` return further settings by name and are called again for every producer.

    When acknowledgements stop for ``stall_seconds``, all records in flight are purged and their events are
    ``Unavailable``. A new producer needs up to a second for its first acknowledgement, so use at least two seconds.
    Acknowledgements that connected brokers owe are waited for while the leases last: for as long as a quota delays
    them or the brokers answer other requests, and otherwise for ``SILENT_STALLS``.

    An event is ``Refused`` only if it has no topic, cannot become a record, or fails alone. If the template has a
    field, an unknown or denied topic makes only its own events ``Unavailable``, with the topic as ``part``. The only
    topic of a sink is its whole destination.

    ``record_format`` has the settings of records, ``creation`` those of created topics, if the sink creates any. With
    ``hold_keys`` no event of a key is sent after a refused one: such events are ``Unavailable`` with ``behind``.
    ``topics`` are patterns of the topics that events may name.

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
        topic: TopicTemplate,
        producer: Mapping[str, Scalar],
        stall_seconds: float,
        *,
        record_format: RecordFormat | None = None,
        creation: TopicCreation | None = None,
        secrets: Mapping[str, Callable[[], str]] | None = None,
        hold_keys: bool = False,
        topics: Sequence[str] = (),
        delivery_details: bool = False,
        schemas: EventSchemas | None = None,
        tokens: TokenProvider | None = None,
    ) -> None:
        self.timeout_seconds = CALL_STALLS * stall_seconds
        self.topic = topic.text
        """The topic, or the template of topics, as the settings have it."""
        self._name = name
        self._stall_seconds = stall_seconds
        self._hold_keys = hold_keys
        self._delivery_details = delivery_details
        self._creates = creation is not None
        self._format = record_format or RecordFormat()
        self._schemas = schemas
        self._is_plain = self._format.plain and schemas is None
        self._resolver = TopicResolver(topic, topics)
        self._settings = ClientSettings(producer, secrets, creates=self._creates, tokens=tokens)
        self._log = ClientLog(self._settings, name)
        self._metadata = TopicMetadata(self._settings, self._log, creation)
        self._troubles = TopicTroubles()
        self._producer: RecordProducer | None = None
        self._open: deque[Delivery] = deque()
        """The calls that have not ended, in order. The records of each were handed over before those of the next."""
        self._spare: list[Delivery] = []
        self._newest = 0
        self._halted: Unavailable | None = None
        """Why nothing is handed over until every call has been taken, or None."""
        self._purged = False
        """True from a purge by another thread on, until its reports are served. Nothing is handed over meanwhile."""
        self._alone_until: tuple[int, int] | None = None
        """The place, call and index, up to which events are sent alone, or None."""
        self._reported = 0
        self._progress_at = self._checked_at = 0.0
        self._lease_until = 0.0
        self._waits_for: str | None = None
        self._woken = threading.Event()

    # -- for any thread -------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Return why no broker is reachable, or what delays acknowledgements, or None."""
        return self._log.trouble or self._log.throttle or self._waits_for

    def wake(self) -> None:
        """See ``Sink``."""
        self._woken.set()

    def purge(self) -> None:
        """Send nothing more that was handed over and is not on its way yet. Its reports end the calls."""
        if self._open and (producer := self._producer) is not None:
            self._purged = True  # first: a later record of a key must not overtake a purged one
            producer.purge(in_flight=False)

    def check(self) -> str | None:
        """Return why the cluster would not accept events now, or None. Creates no topic.

        Checks the metadata of the cluster, those of the topic if there is only one, and the user's limit for records,
        then the schema registry and the subjects of the types that the settings name.
        """
        try:
            problem = self._cluster_check().problem()
        except ClusterUnavailable as reason:
            return str(reason)
        if problem is not None or self._schemas is None:
            return problem
        return self._schemas.check(self._resolver.of_type, CHECK_SECONDS)

    def online_warning(self, payload_bytes: int | None) -> str | None:
        """Return a warning if the topic is missing, or if events with payloads of ``payload_bytes`` would end dead."""
        with contextlib.suppress(ClusterUnavailable):
            return self._cluster_check().warning(payload_bytes)
        return None

    def _cluster_check(self) -> ClusterCheck:
        return ClusterCheck(self._settings, self._resolver.constant, CHECK_SECONDS, creates=self._creates)

    # -- for the thread of the loop -------------------------------------------------------------------------------

    def open(self) -> None:
        """Open a producer, which connects by itself.

        Raise ``ConfigurationError`` for settings that librdkafka does not accept, and for files that cannot be used.
        """
        try:
            if self._producer is None:
                self._open_producer()
        except TokenUnavailable:
            pass  # the first call opens another one
        except ConfigurationError as reason:
            raise ConfigurationError(f"sinks.{self._name}.{reason}") from None

    def close(self) -> None:
        """Purge all records, and close the producer."""
        self.withdraw()
        self._close_producer()

    def submit(self, call: Call) -> None:
        """Begin a call, and hand over what may be sent now."""
        self._newest += 1
        delivery = self._spare.pop() if self._spare else Delivery(self.max_batch)
        now, has_rows = lease_clock(), call.attempt > 0
        deadline = now + self.timeout_seconds if has_rows else max(call.until, now + self._stall_seconds)
        earlier = [each.blocked for each in self._open]
        delivery.begin(call, self._newest, deadline, earlier, details=self._delivery_details or has_rows)
        if has_rows and call.until > now:
            # The lease of a row outlasts the call: ``until`` is the time by which the call should have begun.
            delivery.until = deadline
        self._open.append(delivery)
        if self._halted is not None:
            delivery.abandon(self._halted, purged=False)
        self._work()

    def completed(self, seconds: float) -> Sequence[Call]:
        """See ``Sink``."""
        until = time.monotonic() + seconds
        self._work()
        while not (ended := self._take_ended()) and not self._woken.is_set():
            if (left := until - time.monotonic()) <= 0:
                return ended
            if self._open:
                self._work(min(left, SERVE_SECONDS))
            else:
                self._woken.wait(min(left, IDLE_SECONDS))
                self._work()
        self._woken.clear()
        return ended

    def extend(self, until: float) -> None:
        """Let calls with events of the log last until the ``lease_clock()`` value ``until``."""
        self._lease_until = until

    def deadlines(self) -> Mapping[int, float]:
        """See ``Sink``."""
        return {
            event.id: delivery.deadline + self._stall_seconds
            for delivery in self._open
            if delivery.has_rows and delivery.extended
            for event in delivery.events
        }

    def withdraw(self) -> None:
        """Purge all records, and return when none of them can be sent any more."""
        if self._open:
            self._purge()
        for delivery in self._open:
            for topic in delivery.probes:
                self._troubles.end_probe(topic, delivered=False)
        self._open.clear()
        self._halted, self._purged, self._reported = None, False, 0

    # -- the rounds of serving reports and handing over -----------------------------------------------------------

    def _work(self, seconds: float = 0.0) -> None:
        """Wait up to ``seconds`` for reports, then hand over what may be sent."""
        try:
            self._serve(seconds)
            pause_at = time.monotonic() + RUN_SECONDS
            while self._recover() and (pending := next((each for each in self._open if each.pending), None)):
                if not self._hand_over(pending) or time.monotonic() >= pause_at:
                    break
        except ClusterUnavailable as reason:
            self._end_round(Unavailable(str(reason)), purge=False)
        except (DeliveryHalted, ConfigurationError) as reason:
            self._end_round(Unavailable(self._log.explain(str(reason))), purge=True)
        except LeaseOver:
            self._end_round(LATE, purge=self._purged)

    def _serve(self, seconds: float = 0.0) -> None:
        """Serve the available reports, or wait up to ``seconds`` for some, then look if they come as they should.

        Raise ``DeliveryHalted`` when waiting must end.
        """
        if self._producer is not None:
            self._producer.serve(seconds)
        elif seconds:
            self._woken.wait(seconds)
        if not self._open:
            return
        reported, now = sum(each.reported for each in self._open), time.monotonic()
        if reported > self._reported:
            self._log.clear()
        if reported != self._reported or not self._outstanding:
            self._progress_at, self._waits_for = now, None
        self._reported = reported
        if now - max(self._progress_at, self._checked_at) > self._stall_seconds and not self._is_throttled(now):
            self._wait_or_halt()
        for delivery in self._open:
            self._extend(delivery)
            if not delivery.complete and lease_clock() > delivery.deadline:
                raise DeliveryHalted(f"topic {self.topic}: not acknowledged while the lease lasted")

    def _extend(self, delivery: Delivery) -> None:
        """Let a call last for as long as its leases."""
        now = lease_clock()
        if not delivery.has_rows:
            delivery.extend(self._lease_until)
        elif now > delivery.deadline - self._stall_seconds:
            delivery.extend(now + self.timeout_seconds)

    def _take_ended(self) -> Sequence[Call]:
        """Return the calls that have ended, none before an earlier one."""
        ended: list[Call] = []
        while self._open and self._open[0].complete:
            delivery = self._open.popleft()
            self._reported -= delivery.reported
            for topic, index in delivery.probes.items():
                self._troubles.end_probe(topic, delivered=index not in delivery.decided)
            ended.append(delivery.end())
            self._spare.append(delivery)
        if not self._open:
            self._halted, self._waits_for, self._purged = None, None, False
        return ended

    @property
    def _outstanding(self) -> int:
        """Return the number of records without a delivery report."""
        return sum(each.outstanding for each in self._open)

    def _end_round(self, verdict: Unavailable, *, purge: bool) -> None:
        """Hand over nothing more until every call has been taken. With ``purge`` send nothing more either."""
        if purge:
            self._purge()
        self._halted = verdict
        for delivery in self._open:
            delivery.abandon(verdict, purged=purge)

    def _purge(self) -> None:
        """Purge the producer, serve its reports and close it: no record can be sent any more."""
        if (producer := self._producer) is not None:
            producer.purge(in_flight=True)
            deadline = time.monotonic() + PURGE_SECONDS
            while self._outstanding and time.monotonic() < deadline:
                producer.serve(SERVE_SECONDS)
        self._close_producer()
        self._metadata.clear()
        self._alone_until, self._waits_for, self._purged = None, None, False
        for delivery in self._open:
            delivery.prepared = False

    # -- the producer ---------------------------------------------------------------------------------------------

    def _open_producer(self, *, alone: bool = False) -> RecordProducer:
        """Open the producer. Raise ``ConfigurationError``."""
        self._producer = RecordProducer(self._settings, self._log, self._metadata.batch_bytes, alone=alone)
        self._progress_at = time.monotonic()
        return self._producer

    def _close_producer(self) -> None:
        """Close the producer with its records."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
        self._log.trouble = None

    def _producer_for(self, delivery: Delivery) -> RecordProducer | None:
        """Return the producer for the next pending event, opened if needed, or None while records need reports first.

        Raise ``ConfigurationError`` if it cannot be opened.
        """
        producer, alone = self._producer, False
        if self._alone_until is not None:
            if self._outstanding:
                return None
            alone = (delivery.number, delivery.pending[0]) <= self._alone_until
            self._alone_until = self._alone_until if alone else None
        if producer is not None:
            if producer.alone == alone and (alone or producer.batch_bytes <= self._metadata.batch_bytes):
                return producer
            if self._outstanding:
                return None
            self._close_producer()
        return self._open_producer(alone=alone)

    # -- handing over ---------------------------------------------------------------------------------------------

    def _hand_over(self, delivery: Delivery) -> bool:
        """Hand over some events of ``delivery``. Return False if reports must come first.

        Raise ``ClusterUnavailable`` or ``LeaseOver`` if no event can be handed over now.
        """
        self._extend(delivery)
        if lease_clock() >= delivery.until:
            raise LeaseOver
        if not delivery.prepared:
            self._prepare(delivery)
            return True
        if (producer := self._producer_for(delivery)) is None:
            return False
        indexes = delivery.pending[: 1 if producer.alone else CHECK_EVERY]
        guard = producer.guard
        if guard is not None and guard.is_open(self._topics_of(delivery, indexes)):
            guard = None
        if guard is not None:
            delivery.partitions, delivery.collects = guard.partitions, True
            indexes = guard.sendable(delivery.topics, delivery.events, indexes)
            if not indexes and not self._outstanding:
                guard.record_acknowledged(self._metadata.partitions)
                return True
        blocked = len(delivery.blocked)
        dealt = self._produce(producer, delivery, indexes)
        if guard is not None:
            guard.sent(
                (delivery.topics[i], delivery.events[i].key) for i in indexes[:dealt] if i not in delivery.decided
            )
        if (
            indexes
            and not dealt
            and not self._outstanding
            and producer.fatal is None
            and not self._purged
            and lease_clock() < delivery.until
        ):
            self._refuse(delivery, indexes[0], "larger than the queue of Kafka's client (queue.buffering.max.*)")
            dealt = 1
        delivery.pending = delivery.pending[dealt:]
        if len(delivery.blocked) > blocked:
            self._filter(delivery)
        self._serve()
        return dealt > 0

    def _topics_of(self, delivery: Delivery, indexes: Sequence[int]) -> Collection[str]:
        if self._resolver.constant is not None:
            return (self._resolver.constant,)
        return {delivery.topics[index] for index in indexes}

    def _produce(self, producer: RecordProducer, delivery: Delivery, indexes: Sequence[int]) -> int:  # noqa: C901
        """Hand events to the client and return how many of ``indexes`` are dealt with.

        Fewer than given if the client's queue is full or the producer failed, if making records takes long, and after a
        refused event that holds its key. An event that cannot become a record is refused at once.
        """
        events, topics, callbacks, produce = delivery.events, delivery.topics, delivery.callbacks, producer.produce
        is_plain, pause_at, blocked = self._is_plain, 0.0, len(delivery.blocked)
        dealt = sent = 0
        for index in indexes:
            if self._purged:
                break
            uid, event_type, key, payload, content_type, own = events[index][2:8]
            value: bytes | None = payload
            partition = ANY_PARTITION
            try:
                if is_plain:
                    headers: Headers = [("id", uid), ("type", event_type), ("content-type", content_type)]
                    if own is not None:
                        headers += without_reserved(own_headers(own))
                else:
                    now = time.monotonic()
                    pause_at = pause_at or now + RUN_SECONDS
                    if now > pause_at:
                        break
                    value, partition, headers = self._record(delivery, index)
                    if lease_clock() >= delivery.until:
                        break
                produce(topics[index], value, key, partition, callbacks[index], None, _NOW, headers)
                sent += 1
            except BufferError:
                break
            except KafkaException as exception:
                if not self._take_refusal(producer, delivery, index, error_of(exception)):
                    break
            except Exception as exception:
                # One event must not end the calls of all others. Messages of libraries may contain parts of it.
                text = str(exception) if type(exception) in (ValueError, TypeError) else type(exception).__name__
                self._refuse(delivery, index, f"cannot be made a Kafka record: {text}")
            dealt += 1
            if len(delivery.blocked) > blocked:
                break
        delivery.handed_over += sent
        if sent:
            producer.records_wait()
        return dealt

    def _record(self, delivery: Delivery, index: int) -> tuple[bytes | None, int, Headers]:
        """Return value, partition and headers. Raise ValueError, with a reason, for an event without a record."""
        topic = delivery.topics[index]
        value, partition, headers = self._format.record(delivery.events[index])
        if partition >= self._metadata.partitions(topic):
            self._metadata.refresh(topic, self._stall_seconds)
            if partition >= (count := self._metadata.partitions(topic)):
                raise ValueError(f"topic {topic} has no partition {partition}, it has {count}, counted from 0")
        if value is not None and (serializer := delivery.serializers.get(index)) is not None:
            value = serializer.encode(topic, value)
            headers[CONTENT_TYPE] = ("content-type", serializer.content_type)
        return value, partition, headers

    def _take_refusal(self, producer: RecordProducer, delivery: Delivery, index: int, error: KafkaError) -> bool:
        """Record that the client refused an event. Return False if it refuses all events from now on."""
        match error_kind(error):
            case ErrorKind.FATAL:
                producer.fail(self._settings.describe(error))
                return False
            case ErrorKind.MESSAGE:
                self._refuse(delivery, index, self._settings.describe(error))
            case _:
                delivery.failures[index] = error
        return True

    # -- verdicts on events that are not sent ---------------------------------------------------------------------

    def _refuse(self, delivery: Delivery, index: int, reason: str) -> None:
        """Refuse an event, and block its key where refused events hold it."""
        delivery.decided[index] = Refused(reason)
        if self._hold_keys:
            delivery.block(index, BEHIND)

    def _hold_back(self, delivery: Delivery, index: int, verdict: Unavailable) -> None:
        """Make an event unavailable, and block its key."""
        delivery.decided[index] = verdict
        delivery.block(index, verdict)

    def _filter(self, delivery: Delivery) -> None:
        """Keep the pending events that have no verdict, and whose keys and topics take events now."""
        if self._troubles or delivery.blocked or any(delivery.earlier):
            for index in delivery.pending:
                if index not in delivery.decided and (verdict := self._verdict(delivery, index)) is not None:
                    self._hold_back(delivery, index, verdict)
        if delivery.decided:
            delivery.pending = [index for index in delivery.pending if index not in delivery.decided]

    def _verdict(self, delivery: Delivery, index: int) -> Unavailable | None:
        topic, blocked = delivery.topics[index], delivery.blocking(index)
        if blocked is not None or topic not in self._troubles or delivery.probes.get(topic) == index:
            return blocked
        if self._metadata.unknown((topic,)) or not self._troubles.begin_probe(topic):
            return self._troubles.verdict(topic)
        delivery.probes[topic] = index
        return None

    # -- preparing a call -----------------------------------------------------------------------------------------

    def _prepare(self, delivery: Delivery) -> None:
        """Find topics, read their metadata, and find serializers.

        Raise ``ClusterUnavailable`` if the cluster, the only topic or the registry takes no events.
        """
        if not delivery.topics:
            self._resolve(delivery)
        self._load_metadata(delivery)
        self._filter(delivery)
        if self._schemas is not None:
            self._find_serializers(delivery, self._schemas)
        delivery.prepared = True

    def _resolve(self, delivery: Delivery) -> None:
        if (constant := self._resolver.constant) is not None:
            delivery.topics = [constant] * len(delivery.events)
            return
        for index, event in enumerate(delivery.events):
            try:
                topic = self._resolver.topic(event)
            except ValueError as reason:
                topic = ""
                self._refuse(delivery, index, str(reason))
            delivery.topics.append(topic)
        delivery.pending = [index for index in delivery.pending if index not in delivery.decided]

    def _load_metadata(self, delivery: Delivery) -> None:
        """Request unknown topics."""
        topics = sorted(self._topics_of(delivery, delivery.pending))
        unknown = [topic for topic in self._metadata.unknown(topics) if self._troubles.may_request(topic)]
        if not unknown:
            return
        seconds = min(self._stall_seconds, delivery.until - lease_clock())
        patient = any(topic not in self._troubles for topic in unknown)
        try:
            refused = self._metadata.load(unknown, seconds, patient=patient)
        except ClusterUnavailable:
            if not self._outstanding:
                self._close_producer()  # one that is opened again reads the files with secrets again
            raise
        for topic, reason in refused.items():
            if topic == self._resolver.constant:
                raise ClusterUnavailable(reason)
            self._troubles.add(topic, reason)

    def _find_serializers(self, delivery: Delivery, schemas: EventSchemas) -> None:
        """Find the serializer of each event. One that is sent again keeps its own."""
        for index in delivery.pending:
            if index in delivery.serializers:
                continue
            seconds = min(self._stall_seconds, delivery.until - lease_clock())
            match schemas.serializer(delivery.topics[index], delivery.events[index], seconds):
                case Refused(reason):
                    self._refuse(delivery, index, reason)
                case Unavailable(reason, part=None):
                    raise ClusterUnavailable(reason)
                case Unavailable() as verdict:
                    self._hold_back(delivery, index, verdict)
                case serializer:
                    delivery.serializers[index] = serializer
        self._filter(delivery)

    # -- recovery -------------------------------------------------------------------------------------------------

    def _recover(self) -> bool:
        """Recover from failed records or a failed producer, once every record has its report.

        Return False if reports must come first. Raise ``DeliveryHalted`` if the destination is at fault, and
        ``LeaseOver`` after a purge. Otherwise the failed records are pending again, before all other events; those up
        to the last suspect are sent alone.
        """
        if self._purged:
            if self._outstanding:
                return False
            raise LeaseOver
        producer = self._producer
        if producer is None or (producer.fatal is None and not any(each.failures for each in self._open)):
            return True
        if not self._outstanding:
            self._send_again(producer)
            return True
        if producer.fatal is not None:
            # A failed producer sends no more records, but keeps those of a failed request.
            producer.purge(in_flight=False)
        return False

    def _send_again(self, producer: RecordProducer) -> None:
        """Blame records or topics for the failures, and make the failed records pending again."""
        suspects, topics = self._causes()
        if not suspects and not topics:
            raise DeliveryHalted(producer.fatal or "Kafka's client returned records")
        for topic, reason in topics.items():
            self._troubles.add(topic, reason)
            self._metadata.forget(topic)
            for delivery in self._open:
                delivery.probes.pop(topic, None)
        for delivery, index in suspects:
            if producer.alone:
                self._refuse(delivery, index, self._described(delivery, index))
                del delivery.failures[index]
            else:
                self._alone_until = (delivery.number, index)
        if producer.fatal is not None:
            self._close_producer()
        for delivery in self._open:
            delivery.pending = [*sorted(delivery.failures), *delivery.pending]
            delivery.failures, delivery.prepared = {}, False

    def _causes(self) -> tuple[list[tuple[Delivery, int]], dict[str, str]]:
        """Return the failed records that may be at fault, in order, and the topics at fault with the reasons.

        Records that failed because of their producer are neither: another record is the cause. Raise
        ``DeliveryHalted`` if the destination is at fault. The only topic of a sink is its whole destination.
        """
        suspects: list[tuple[Delivery, int]] = []
        topics: dict[str, str] = {}
        for delivery in self._open:
            for index in sorted(delivery.failures):
                kind = error_kind(delivery.failures[index])
                if kind is ErrorKind.MESSAGE:
                    suspects.append((delivery, index))
                elif kind is ErrorKind.TOPIC and self._resolver.constant is None:
                    topics[delivery.topics[index]] = self._described(delivery, index)
                elif kind in (ErrorKind.TOPIC, ErrorKind.DESTINATION):
                    raise DeliveryHalted(self._described(delivery, index))
        return suspects, topics

    def _described(self, delivery: Delivery, index: int) -> str:
        """Return the error of a failed record for people."""
        return f"topic {delivery.topics[index]}: {self._settings.describe(delivery.failures[index])}"

    # -- stalls ---------------------------------------------------------------------------------------------------

    def _is_throttled(self, now: float) -> bool:
        """Return True if acknowledgements cannot come yet, because a quota is reached."""
        return now < self._log.throttled_until + self._stall_seconds and bool(self._owing)

    @property
    def _owing(self) -> Collection[int]:
        return () if self._producer is None else self._producer.owing

    def _wait_or_halt(self) -> None:
        """Wait for acknowledgements that connected brokers owe. Raise ``DeliveryHalted`` if no more come."""
        self._waits_for = f"topic {self.topic}: no acknowledgement for {self._stall_seconds:g} s"
        if not self._owing:
            raise DeliveryHalted(self._waits_for)
        # Those that answer other requests are only slow.
        answer, now = self._answer(self._owing), time.monotonic()
        if answer:
            self._progress_at = now
        elif now - self._progress_at > SILENT_STALLS * self._stall_seconds:
            raise DeliveryHalted(self._waits_for)
        self._checked_at = now

    def _answer(self, brokers: Collection[int]) -> bool:
        """Return True if ``brokers`` answer a request on another connection."""
        try:
            cluster = Cluster(self._settings, self._log, STALL_REQUEST_SECONDS)
            cluster.metadata()
            return not cluster.silent(brokers)
        except (ClusterUnavailable, KafkaException):
            return False


# -- from settings to a sink ------------------------------------------------------------------------------------------


def kafka_sink(name: str, settings: KafkaSettings, lease_seconds: float, replay: int | None = None) -> KafkaSink:
    """Return the Kafka sink ``name``, or its client for a ``replay``, not yet open."""
    return KafkaSink(
        name,
        settings.topic_template(),
        settings.plain_producer,
        max(STALL_MIN_SECONDS, lease_seconds / 3),
        record_format=_record_format(settings, replay),
        creation=_topic_creation(settings),
        secrets={name: partial(secret.read, str) for name, secret in settings.secret_producer.items()},
        hold_keys=replay is None and settings.when_dead == "hold" and settings.order == "key",
        topics=settings.topics,
        delivery_details=settings.record_attempts == "all",
        schemas=_event_schemas(name, settings),
        tokens=_token_provider(name, settings),
    )


def _token_provider(name: str, settings: KafkaSettings) -> TokenProvider | None:
    """Return the provider of tokens, if there is one. Raise ``ConfigurationError`` if it cannot be imported."""
    try:
        return TokenProvider(settings.token_provider) if settings.token_provider else None
    except ConfigurationError as error:
        raise ConfigurationError(f"sinks.{name}.{error}") from None


def _event_schemas(name: str, settings: KafkaSettings) -> EventSchemas | None:
    """Return the schemas of a sink with a registry, or None. Raises ``ConfigurationError`` without its packages."""
    registry, topic = settings.registry, settings.topic_template()
    if not registry.url:
        return None
    try:
        from outbox_relay.sinks.kafka.schemas import EventSchemas
    except ImportError:
        needs = "needs pip install 'outbox-relay[registry]'"
        raise ConfigurationError(f"sinks.{name}.registry: {needs}") from None
    return EventSchemas(registry, None if topic.fields else settings.topic)


def _record_format(settings: KafkaSettings, replay: int | None) -> RecordFormat:
    return RecordFormat(
        settings.partition_header or None,
        settings.tombstones,
        None if settings.cloudevents == "none" else settings.cloudevents,
        settings.cloudevents_source,
        settings.type_header or None,
        replay,
    )


def _topic_creation(settings: KafkaSettings) -> TopicCreation | None:
    creation = settings.create_topics
    return None if creation is None else TopicCreation(creation.partitions, creation.replication_factor)
