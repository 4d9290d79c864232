"""The thread of a Kafka sink: takes calls in order, hands their events over, and knows what became of each.

Everything that touches a producer happens in this one thread, the delivery reports included: they are served
between handing over, so no two threads contend for the interpreter record by record.

What keeps order and loses nothing:

- librdkafka never gives up by itself. When acknowledgements stop, all is purged, all reports are served, the
  producers are replaced, and what was not acknowledged is ``Unavailable``: acknowledged is a prefix per partition.
- A request that fails for good ends its producer (``enable.gapless.guarantee``), so nothing later overtakes; a new
  producer begins with one event of each key (``opening``). The events that were under way are then sent again in order,
  up to the last suspect one at a time: only what fails alone is ``Refused``.
- A topic that takes no events keeps none of the others: its events are ``Unavailable`` without being sent, but for a
  probe now and then.
- A call is answered after all earlier ones, with verdicts in which nothing follows an unavailable event of its key.
- Where dead letters hold their key, nothing of a key is handed over after a refused event. What failed in one request
  with it, or behind it, is sent again only after it was found out: by then its key is known to wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from confluent_kafka import KafkaException

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.domain.event import PAYLOAD
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, KeyBlocks
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, error_of
from outbox_relay.sinks.kafka.errors import TOO_LARGE, ErrorKind, error_kind
from outbox_relay.sinks.kafka.in_flight_messages import (
    CAREFUL,
    ROOM_SECONDS,
    DeliveryHalted,
    DeliveryStalled,
    InFlightMessages,
)
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard
from outbox_relay.sinks.kafka.records import RecordFormat, TopicResolver
from outbox_relay.sinks.kafka.statistics import Statistics
from outbox_relay.sinks.kafka.topic_admission import TopicAdmission
from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers
from outbox_relay.sinks.kafka.topic_metadata import TOPICS, ClusterUnavailable, TopicCreation, TopicMetadata

CHECK_EVERY = 100
"""Events handed over between two looks at the clock and the reports."""
SERVE_SECONDS = 0.001
"""One wait for reports while some are outstanding and no call comes."""
IDLE_SECONDS = 0.5
"""The same while none is: only the client's own errors and log lines are served then."""
BLAME_SECONDS = 1.0
"""Longest wait for what the brokers say of the topics of records that are not acknowledged."""
BLAMED_TOPICS = 50
"""Topics asked about then, at most."""
LATE = "not handed to Kafka's client in time"

Job: TypeAlias = Callable[[], None]


class ProducerThread:
    """Delivers the calls of one sink. ``put`` may be called from any thread, the jobs run in the lane's own.

    ``places`` is the most that a call may hold. With ``hold_keys`` a refused event holds back what follows of its key.
    """

    def __init__(
        self,
        name: str,
        settings: ClientSettings,
        topics: TopicResolver,
        stall_seconds: float,
        places: int,
        form: RecordFormat,
        creation: TopicCreation | None,
        *,
        hold_keys: bool,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._stall_seconds = stall_seconds
        self._places = places
        self._form = form
        self._hold_keys = hold_keys
        self._name = name
        self._log = ClientLog(settings, name)
        self._limits = TopicMetadata(settings, self._log, creation)
        self._admission = TopicAdmission(topics.most, topics.named)
        self._troubles = TopicBreakers()
        self._blocks = KeyBlocks()
        self._under_way = InFlightMessages(settings, self._log, form, stall_seconds)
        self._placed: dict[str, int] = {}
        # Not a SimpleQueue: before Python 3.13 its get() waits for ever when its time is up between two looks.
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._spare: list[DeliveryReports] = []
        self._outdated = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kafka sink {name}", daemon=True)

    # -- from other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the first producer and begin to take jobs.

        Raises KafkaException for settings that make none, and ``Misconfigured`` for a file that cannot be read.
        """
        self._under_way.open(self._limits.most)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run ``job`` in the lane's thread, after those put before it."""
        self._jobs.put(job)

    def join(self) -> None:
        """Wait until the thread has ended, which it does at the job ``stop``. Blocks."""
        self._thread.join()

    def reports(self) -> DeliveryReports:
        """A counter for a new call."""
        return self._spare.pop() if self._spare else DeliveryReports(self._places)

    @property
    def trouble(self) -> str | None:
        """Why no broker can be reached, as the client last said."""
        return self._log.trouble

    @property
    def statistics(self) -> Statistics:
        """What the client counts about the producers."""
        return self._under_way.statistics

    # -- jobs ---------------------------------------------------------------------------------------------------

    def take(self, call: DeliverCall) -> None:
        """Deliver ``call``."""
        call.holding = self._blocks if self._hold_keys else None
        self._under_way.calls.append(call)
        self._blocks.prune(self._under_way.calls[0].number)
        self._work()

    def withdraw(self, done: Job) -> None:
        """Take back all that was handed over, and call ``done`` once nothing of it can be sent any more."""
        if self._under_way.calls:
            self._end("withdrawn")
        done()

    def renew(self, settings: ClientSettings) -> None:
        """Before anything more is handed over, replace every producer by one with ``settings``."""
        self._settings.adopt(settings)
        self._outdated = True
        self._work()

    def stop(self) -> None:
        """End the thread."""
        self.withdraw(self._under_way.drop)
        self._stopped = True

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            job = self._next()
            try:
                job()
            except Exception:
                # Whoever waits must hear of it, and the next call begins with a new producer.
                logging.getLogger("outbox_relay.kafka").exception("the Kafka sink failed", extra={"sink": self._name})
                self._end("the Kafka sink failed: see the log")

    def _next(self) -> Job:
        """The next job; until there is one, reports are served and stalls noticed."""
        under_way = bool(self._under_way.calls)
        try:
            return self._jobs.get(block=not under_way, timeout=IDLE_SECONDS)
        except queue.Empty:
            return partial(self._work, SERVE_SECONDS if under_way else 0.0)

    def _work(self, seconds: float = 0.0) -> None:
        """Wait up to ``seconds`` for reports, bring all calls as far as they go, answer those of which all is known."""
        while True:
            try:
                self._advance(seconds)
            except DeliveryStalled as stalled:
                if self._blamed():
                    continue
                self._end(str(stalled))
            except DeliveryHalted as halt:
                self._end(str(halt))
            break
        self._answer()

    def _advance(self, seconds: float) -> None:
        under_way = self._under_way
        under_way.serve(seconds)
        while True:
            if under_way.broken:
                self._mend()
            elif self._outdated:
                self._replace()
            elif call := next((call for call in under_way.calls if call.todo), None):
                self._feed(call)
            else:
                break

    def _replace(self) -> None:
        """End the producers once all they hold is reported on, so that nothing overtakes; new ones are made at need."""
        self._under_way.drain()
        if not self._under_way.broken:
            self._under_way.drop()
            self._start_over()

    def _start_over(self) -> None:
        """Of the producers that were nothing is left: know nothing of topics that may have changed since."""
        self._limits.forget()
        self._placed.clear()
        self._outdated = False

    def _answer(self) -> None:
        """Answer the calls that are complete, none before an earlier one."""
        while (call := self._under_way.complete()) is not None:
            for topic, place in call.probes.items():
                (self._troubles.mended if call.delivered(place) else self._troubles.unused)(topic)
            call.answer(call.verdicts(self._blocks))
            call.reports.clear()
            self._spare.append(call.reports)

    def _end(self, reason: str) -> None:
        """Take back everything under way and answer it."""
        reason = self._log.explain(reason)
        self._under_way.take_back()
        self._start_over()
        for call in self._under_way.calls:
            call.course.ended = reason
            call.give_up()
            if call.outstanding:
                # Not reported even now, so nobody knows which: all of it counts as not delivered.
                call.lost = range(len(call.batch))
                call.sent = call.reports.count
        self._answer()

    # -- handing over -------------------------------------------------------------------------------------------

    def _feed(self, call: DeliverCall) -> None:
        """Hand over what is left of ``call``; returns early when a report shows a failure."""
        if call.course.ended is not None:
            call.give_up()
        elif self._prepared(call):
            self._hand_over(call)

    def _hand_over(self, call: DeliverCall) -> None:
        under_way = self._under_way
        while call.todo and not under_way.broken:
            if lease_clock() >= call.until:
                self._cut(call, LATE)
                return
            size, places = self._next_places(call)
            wire, blocking = under_way.wire(size), len(call.blocks)
            opening = wire.opening
            if opening is not None and opening.over(call, places):
                opening = None
            if opening is not None and not (places := self._opened(opening, call, places)):
                continue
            dealt = wire.put(call, places)
            if opening is not None:
                opening.sent(call, places[:dealt])
            if not dealt and not under_way.outstanding and wire.fatal is None:
                call.refuse(call.todo[0], "larger than the queue of Kafka's client (queue.buffering.max.*)")
                dealt = 1
            call.todo = call.todo[dealt:]
            if len(call.blocks) > blocking:
                call.todo = self._screened(call, call.todo)
            under_way.serve(0.0 if dealt else ROOM_SECONDS)

    def _opened(self, opening: NewProducerGuard, call: DeliverCall, places: Sequence[int]) -> Sequence[int]:
        """Those of ``places`` that may go out on a producer that is new; none when a failure shows meanwhile."""
        call.reports.partitions = opening.partitions
        if fitting := opening.fitting(call, places):
            return fitting
        self._under_way.drain()
        if not self._under_way.broken:
            opening.acknowledged(self._limits.partitions)
        return ()

    @staticmethod
    def _next_places(call: DeliverCall) -> tuple[int, Sequence[int]]:
        """The next few places that go to one producer, and which that is."""
        places = call.todo[:CHECK_EVERY]
        if isinstance(call.producers, int):
            return call.producers, places
        size = call.producers[places[0]]
        run = next((n for n, place in enumerate(places) if call.producers[place] != size), len(places))
        return size, places[:run]

    def _cut(self, call: DeliverCall, reason: str) -> None:
        """Hand over nothing more in this course; what was handed over is still waited for."""
        call.course.ended = self._log.explain(reason)
        call.give_up()

    def _prepared(self, call: DeliverCall) -> bool:
        """Learn what ``call`` needs to know of its topics; returns False when it cannot be fed now."""
        if lease_clock() >= call.until:
            self._cut(call, LATE)
            return False
        if not call.topics:
            call.topics = self._topics.of(call.batch, call.refuse)
        only = self._topics.constant
        topics = [only] if only is not None else sorted({topic for topic in call.topics if topic is not None})
        if not self._learned(call, topics):
            return False
        if len(self._troubles) or len(self._blocks):
            call.todo = self._screened(call, call.todo)
        # Topics that are left out now are in trouble: nothing of them is handed over.
        known = [topic for topic in topics if not self._limits.unknown((topic,))]
        if not self._placed_well(call, known):
            return False
        self._refuse_too_large(call, known)
        self._refuse_without_partition(call)
        if call.holding is not None and len(call.holding):
            call.todo = self._screened(call, call.todo)
        return True

    def _learned(self, call: DeliverCall, topics: list[str]) -> bool:
        """Ask about the topics not known yet; ends the course when the cluster does not answer."""
        now = time.monotonic()
        unknown = [topic for topic in self._limits.unknown(topics) if self._troubles.due(topic, now)]
        if not unknown:
            return True
        self._limits.over = lambda: call.course.withdrawn
        refused: Mapping[str, str] = {}
        try:
            seconds = min(self._stall_seconds, call.until - lease_clock())
            unknown = self._admitted(call, unknown, seconds)
            new = any(topic not in self._troubles for topic in unknown)
            if unknown:
                refused = self._limits.learn(unknown, seconds, patient=new)
        except (ClusterUnavailable, Misconfigured) as reason:
            self._cut(call, str(reason))
            if not self._under_way.outstanding:
                # Made again, they read files with secrets again.
                self._under_way.drop()
            return False
        except KafkaException as exception:
            self._cut(call, self._settings.describe(error_of(exception)))
            return False
        if refused and self._topics.constant is not None:
            self._cut(call, next(iter(refused.values())))
            return False
        for topic, reason in refused.items():
            self._troubles.note(topic, reason, time.monotonic())
        return True

    def _admitted(self, call: DeliverCall, topics: list[str], seconds: float) -> list[str]:
        """Return those of ``topics`` that the sink may ask for; the events of the others are refused.

        Raises ``ClusterUnavailable`` when the cluster has to be asked and does not answer.
        """
        if self._topics.constant is not None:
            return topics
        refused = self._admission.refused(topics, partial(self._limits.existing, seconds))
        if refused:
            topics_of = list(call.topics)
            for place in call.todo:
                topic = topics_of[place]
                if topic in refused:
                    topics_of[place] = None
                    call.refuse(place, refused[topic])
            call.topics = topics_of
        return [topic for topic in topics if topic not in refused]

    def _screened(self, call: DeliverCall, places: Sequence[int]) -> list[int]:
        """Those of ``places`` that may be sent: not those of topics in trouble, nor what follows one of its key."""
        now = time.monotonic()
        left: list[int] = []
        for place in places:
            topic, key = call.topics[place], call.batch[place].key
            verdict = None if key is None else self._blocks.on(call, place, key)
            in_trouble = verdict is None and topic is not None and topic in self._troubles
            if topic is not None and in_trouble and not self._probes(call, place, topic, now):
                verdict = self._troubles.verdict(topic, now)
            if verdict is None:
                left.append(place)
            else:
                self._judge(call, place, verdict)
        return left

    def _probes(self, call: DeliverCall, place: int, topic: str, now: float) -> bool:
        """Whether the event at ``place`` is the probe of ``topic``."""
        if call.probes.get(topic) == place:
            return True
        if self._limits.unknown((topic,)) or not self._troubles.probe(topic, now):
            return False
        call.probes[topic] = place
        return True

    def _judge(self, call: DeliverCall, place: int, verdict: Unavailable) -> None:
        key = call.batch[place].key
        call.judged[place] = verdict
        if key is not None:
            self._blocks.begin(call, place, key, verdict)

    def _placed_well(self, call: DeliverCall, topics: list[str]) -> bool:
        """Choose the producer of each place; returns False when a failure shows while a topic changes its producer."""
        under_way = self._under_way
        sizes = {topic: self._limits.size(topic) for topic in topics}
        if any(self._placed.get(topic, size) != size for topic, size in sizes.items()) or len(self._placed) > TOPICS:
            under_way.drain()
            if under_way.broken:
                return False
            self._placed.clear()
        self._placed.update(sizes)
        different = set(sizes.values())
        if call.probes or len(different) > 1:
            # A probe that fails must not end a producer that others use.
            probes = set(call.probes.values())
            call.producers = [
                CAREFUL if place in probes else sizes.get(topic or "", self._limits.most)
                for place, topic in enumerate(call.topics)
            ]
        else:
            call.producers = next(iter(different), self._limits.most)
        idle = [size for size in under_way.sizes() if not self._limits.in_use(size) and size not in different]
        if idle and not under_way.outstanding:
            under_way.drop(idle)
        return True

    def _refuse_too_large(self, call: DeliverCall, topics: list[str]) -> None:
        """Refuse the events whose payload alone exceeds the limit of their topic, as far as that can be known."""
        limits = {topic: limit for topic in topics if (limit := self._limits.of(topic)) is not None}
        if self._settings.compresses or not limits:
            return
        least = min(limits.values())
        if max(map(len, map(PAYLOAD, call.batch))) <= least:
            return
        topics_of = list(call.topics)
        for place in [place for place in call.todo if len(call.batch[place].payload) > least]:
            topic, size = topics_of[place], len(call.batch[place].payload)
            if topic in limits and size > limits[topic]:
                self._limits.refresh(topic, self._stall_seconds)
                limits[topic] = limit = self._limits.of(topic) or size
                if size > limit:
                    topics_of[place] = None
                    call.refuse(
                        place, f"topic {topic}: MSG_SIZE_TOO_LARGE: {size} bytes, the topic takes at most {limit}"
                    )
        call.topics = topics_of

    def _refuse_without_partition(self, call: DeliverCall) -> None:
        """Refuse the events that name a partition which their topic does not have."""
        if self._form.partition_header is None:
            return
        topics_of = list(call.topics)
        for place in call.todo:
            topic = topics_of[place]
            if topic is None:
                continue
            try:
                partition = self._form.partition(own_headers(call.batch[place].headers))
            except ValueError as reason:
                topics_of[place] = None
                call.refuse(place, str(reason))
                continue
            if partition >= self._limits.partitions(topic):
                self._limits.refresh(topic, self._stall_seconds)
                count = self._limits.partitions(topic)
                if partition >= count:
                    topics_of[place] = None
                    call.refuse(
                        place, f"topic {topic}: there is no partition {partition}, there are {count}, counted from 0"
                    )
        call.topics = topics_of

    # -- trouble ------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Find out which records a request failed for; raises ``DeliveryHalted`` when it is neither about them nor their topic.

        From the first record that failed to the last one that may have done so by its own fault, all that failed is
        sent again alone; what failed behind it is handed over again before anything else.
        """
        under_way = self._under_way
        self._causes()
        under_way.drain()
        suspects, topics = self._causes()
        if not suspects and not topics:
            raise DeliveryHalted(under_way.fatal or "Kafka's client gave records back")
        failures = under_way.failures()
        under_way.drop_dead()
        for topic, reason in topics.items():
            self._note(topic, reason)
        alone = [failure for failure in failures if suspects and failure <= suspects[-1]]
        self._isolate(alone)
        self._hand_over_again(failures[len(alone) :])

    def _hand_over_again(self, failures: Sequence[tuple[int, int]]) -> None:
        for number, call in enumerate(self._under_way.calls):
            again = [place for at, place in failures if at == number]
            call.todo = [*again, *call.todo] if again else call.todo
            call.reports.failures.clear()

    def _causes(self) -> tuple[list[tuple[int, int]], dict[str, str]]:
        """Of the records that failed, those whose own fault it may be, and the topics at fault with the reasons.

        Raises ``DeliveryHalted`` when it is the destination's. What failed because the producer did is none of these: it failed
        with one of them.
        """
        suspects: list[tuple[int, int]] = []
        topics: dict[str, str] = {}
        for number, place in self._under_way.failures():
            call, error = self._under_way.calls[number], self._under_way.failure(number, place)
            match self._kind_of(call, place):
                case ErrorKind.MESSAGE:
                    suspects.append((number, place))
                case ErrorKind.TOPIC:
                    topics[call.topics[place] or ""] = self._under_way.told(call, place, error)
                case ErrorKind.DESTINATION:
                    raise DeliveryHalted(self._under_way.told(call, place, error))
                case _:
                    pass
        return suspects, topics

    def _kind_of(self, call: DeliverCall, place: int) -> ErrorKind:
        """Whom the failure of a record is about: the only topic of a sink is the whole destination."""
        found = error_kind(call.reports.failures[place])
        return ErrorKind.DESTINATION if found is ErrorKind.TOPIC and self._topics.constant is not None else found

    def _note(self, topic: str, reason: str) -> None:
        self._troubles.note(topic, reason, time.monotonic())
        self._limits.doubt(topic)
        for call in self._under_way.calls:
            call.probes.pop(topic, None)

    def _blamed(self) -> bool:
        """After a stall: whether it is about topics, which are then in trouble; what is under way begins again."""
        topics = self._under_way.topics()
        if self._topics.constant is not None or len(topics) > BLAMED_TOPICS:
            return False
        try:
            refused = self._limits.learn(topics, BLAME_SECONDS, patient=False)
        except (ClusterUnavailable, Misconfigured, KafkaException):
            return False
        if not refused:
            return False
        for topic, reason in refused.items():
            self._note(topic, reason)
        self._under_way.take_back()
        if self._under_way.outstanding:
            return False
        self._hand_over_again(self._under_way.failures())
        return True

    def _isolate(self, failures: list[tuple[int, int]]) -> None:
        """Send records again in order, each alone: what fails alone is refused."""
        calls = self._under_way.calls
        too_large = [at for at in failures if self._under_way.failure(*at).name() in TOO_LARGE]
        for number, place in failures:
            if self._screened(calls[number], (place,)):
                self._alone(calls[number], place)
            else:
                del calls[number].reports.failures[place]
        # What fits when it is alone was in a batch too large for the topic.
        for topic in {calls[number].topics[place] for number, place in too_large if place not in calls[number].judged}:
            self._limits.too_large(topic or "")

    def _alone(self, call: DeliverCall, place: int) -> None:
        """Send one record and wait for its report. Raises ``DeliveryHalted`` when the destination fails meanwhile."""
        if lease_clock() >= call.until:
            raise DeliveryHalted(LATE)
        failures, wire = call.reports.failures, self._under_way.wire(CAREFUL)
        del failures[place]
        if not wire.put(call, (place,)):
            call.lost = [*call.lost, place]
            raise DeliveryHalted(wire.fatal or "Kafka's client has no room for a single record")
        self._under_way.drain()
        error = failures.get(place)
        if error is None:
            return
        reason = self._under_way.told(call, place, error)
        match self._kind_of(call, place):
            case ErrorKind.MESSAGE:
                call.refuse(place, reason)
            case ErrorKind.TOPIC:
                topic = call.topics[place] or ""
                self._note(topic, reason)
                self._judge(call, place, self._troubles.verdict(topic, time.monotonic()))
            case _:
                raise DeliveryHalted(reason)
        del failures[place]
