"""The thread of a Kafka sink: takes calls in order, hands their events over, and knows what became of each.

Everything that touches the producer happens in this one thread, the delivery reports included: they are served
between handing over, so no two threads contend for the interpreter record by record.

What keeps order and loses nothing:

- librdkafka never gives up by itself. When acknowledgements stop, all is purged, all reports are served, the
  producer is replaced, and what was not acknowledged is ``Unavailable``: acknowledged is a prefix per partition.
- A request that fails for good ends its producer (``enable.gapless.guarantee``), so nothing later overtakes. The
  events that were under way are then sent again in order, up to the last suspect one at a time: only what fails
  alone is ``Refused``.
- A call is answered after all earlier ones, with verdicts in which nothing follows an unavailable event of its key.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TypeAlias

from confluent_kafka import KafkaError, KafkaException

from outbox_relay.event import Event
from outbox_relay.policy import Refused
from outbox_relay.sinks.kafka.call import Call, Reports
from outbox_relay.sinks.kafka.client import ONE_AT_A_TIME, ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.errors import TOO_LARGE, Kind, kind
from outbox_relay.sinks.kafka.limits import Limits, NotReady
from outbox_relay.sinks.kafka.records import Topics
from outbox_relay.sinks.kafka.wire import Wire

CHECK_EVERY = 100
"""Events handed over between two looks at the clock and the reports."""
SERVE_SECONDS = 0.001
"""How often reports are looked for while some are outstanding and no call comes."""
IDLE_SECONDS = 0.5
"""The same while none is: only the client's own errors and log lines are served then."""
ROOM_SECONDS = 0.05
"""One wait for room in the client's queue, or for reports when nothing else can be done."""
PURGE_SECONDS = 5.0
"""Longest wait for the reports of purged records; they are made by this process and come at once."""
NAMED_TOPICS = 3
"""Topics that a reason names at most."""
_PAYLOAD = itemgetter(Event._fields.index("payload"))
LATE = "not handed to Kafka's client in time"

Job: TypeAlias = Callable[[], None]


class Halt(Exception):
    """Nothing more can be delivered now: what is under way is taken back. The message says why."""


class Lane:
    """Delivers the calls of one sink. ``put`` may be called from any thread, all else runs in the lane's own."""

    def __init__(self, name: str, settings: ClientSettings, topics: Topics, stall_seconds: float, places: int) -> None:
        self._settings = settings
        self._topics = topics
        self._stall_seconds = stall_seconds
        self._places = places
        self._log = ClientLog(settings)
        self._limits = Limits(settings, self._log)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._calls: deque[Call] = deque()
        self._spare: list[Reports] = []
        self._wire: Wire | None = None
        self._reported = 0
        self._progress_at = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kafka sink {name}", daemon=True)

    # -- from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the first producer and begin to take jobs. Raises KafkaException for settings that make none."""
        self._open()
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run ``job`` in the lane's thread, after those put before it."""
        self._jobs.put(job)

    def join(self) -> None:
        """Wait until the thread has ended, which it does at the job ``stop``. Blocks."""
        self._thread.join()

    def reports(self) -> Reports:
        """A counter for a new call."""
        return self._spare.pop() if self._spare else Reports(self._places)

    # -- jobs -------------------------------------------------------------------------------------------------

    def take(self, call: Call) -> None:
        """Deliver ``call``."""
        if call.course.ended is not None:
            call.give_up()
        self._calls.append(call)
        self._work()

    def withdraw(self, done: Job) -> None:
        """Take back all that was handed over, and call ``done`` once nothing of it can be sent any more."""
        if self._calls:
            self._end(Halt("withdrawn"))
            self._answer()
        done()

    def stop(self) -> None:
        """End the thread."""
        self.withdraw(self._drop_wire)
        self._stopped = True

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            job = self._next()
            try:
                job()
            except Exception:
                # Whoever waits must hear of it, and the next call begins with a new producer.
                logging.getLogger("outbox_relay.kafka").exception("the Kafka sink failed")
                self._end(Halt("the Kafka sink failed: see the log"))
                self._answer()

    def _next(self) -> Job:
        """The next job; until there is one, reports are served and stalls noticed."""
        while True:
            try:
                return self._jobs.get(timeout=SERVE_SECONDS if self._calls else IDLE_SECONDS)
            except queue.Empty:
                if self._wire is not None:
                    return self._work

    def _work(self) -> None:
        """Bring all calls as far as they go now, and answer those of which everything is known."""
        try:
            self._serve()
            self._check()
            while True:
                if self._broken():
                    self._mend()
                elif call := next((call for call in self._calls if call.todo), None):
                    self._feed(call)
                else:
                    break
        except Halt as halt:
            self._end(halt)
        self._answer()

    def _serve(self, seconds: float = 0.0) -> None:
        """Serve delivery reports, waiting up to ``seconds`` when there is none, and note whether any came."""
        if self._wire is not None:
            self._wire.poll(seconds)
        reported = sum(call.reports.count for call in self._calls)
        if reported > self._reported:
            self._log.last_error = None
        if reported != self._reported or not self._outstanding:
            self._progress_at = time.monotonic()
        self._reported = reported

    def _check(self) -> None:
        """Raise ``Halt`` when what is under way must not be waited for any longer."""
        if not self._calls:
            return
        now = time.monotonic()
        if any(call.course.withdrawn and not call.complete for call in self._calls):
            raise Halt("withdrawn")
        if now - self._progress_at > self._stall_seconds:
            raise Halt(f"{self._of_topics()}no acknowledgement for {self._stall_seconds:g} s")
        if now > self._calls[0].deadline:
            raise Halt(f"{self._of_topics()}a batch was not acknowledged in time")

    def _of_topics(self) -> str:
        """The topics of the calls under way, for the beginning of a reason."""
        topics = sorted({topic for call in self._calls for topic in call.topics if topic is not None})
        named = ", ".join(topics[:NAMED_TOPICS]) + (", …" if len(topics) > NAMED_TOPICS else "")
        return f"topic {named}: " if topics else ""

    @property
    def _outstanding(self) -> int:
        return sum(call.outstanding for call in self._calls)

    def _broken(self) -> bool:
        dead = self._wire is not None and self._wire.fatal is not None
        return dead or any(call.reports.failures for call in self._calls)

    def _answer(self) -> None:
        """Answer the calls that are complete, none before an earlier one."""
        while self._calls and self._calls[0].complete:
            call = self._calls.popleft()
            self._reported -= call.reports.count
            call.answer(call.verdicts())
            call.reports.clear()
            self._spare.append(call.reports)

    # -- handing over -----------------------------------------------------------------------------------------

    def _feed(self, call: Call) -> None:
        """Hand over what is left of ``call``; returns early when a report shows a failure."""
        if call.course.ended is not None:
            return self._cut(call, call.course.ended)
        if not self._prepared(call):
            return None
        wire = self._opened()
        while call.todo:
            if time.monotonic() >= call.until:
                return self._cut(call, LATE)
            dealt = wire.put(call, call.todo[:CHECK_EVERY])
            if not dealt and not self._outstanding and wire.fatal is None:
                call.judged[call.todo[0]] = Refused("larger than the queue of Kafka's client (queue.buffering.max.*)")
                dealt = 1
            call.todo = call.todo[dealt:]
            self._serve(0.0 if dealt else ROOM_SECONDS)
            self._check()
            if self._broken():
                return None
        return None

    def _cut(self, call: Call, reason: str) -> None:
        """Hand over nothing more in this course; what was handed over is still waited for."""
        reason = self._log.explain(reason)
        for later in list(self._calls)[self._calls.index(call) :]:
            later.course.ended = later.course.ended or reason
            later.give_up()

    def _prepared(self, call: Call) -> bool:
        """Learn what ``call`` needs to know of its topics; returns False when it cannot be fed now."""
        if not call.topics:
            call.topics = self._topics.of(call.batch, call.judged)
        only = self._topics.constant
        topics = [only] if only is not None else sorted({topic for topic in call.topics if topic is not None})
        if unknown := self._limits.unknown(topics):
            try:
                self._limits.learn(unknown, min(self._stall_seconds, call.until - time.monotonic()))
            except (NotReady, KafkaException) as reason:
                self._cut(call, str(reason))
                return False
        if self._opened().batch_bytes > self._limits.batch_bytes:
            self._drain()
            if self._broken():
                return False
            self._drop_wire()
        self._refuse_too_large(call, topics)
        return True

    def _refuse_too_large(self, call: Call, topics: list[str]) -> None:
        """Refuse the events whose payload alone exceeds the limit of their topic, as far as that can be known."""
        limits = {topic: limit for topic in topics if (limit := self._limits.of(topic)) is not None}
        if self._settings.compresses or not limits:
            return
        if max(map(len, map(_PAYLOAD, call.batch))) <= min(limits.values()):
            return
        topics_of = list(call.topics)
        for place in call.todo:
            topic, size = topics_of[place], len(call.batch[place].payload)
            if topic in limits and size > limits[topic]:
                self._limits.refresh(topic, self._stall_seconds)
                limits[topic] = limit = self._limits.of(topic) or size
                if size > limit:
                    reason = f"MSG_SIZE_TOO_LARGE: {size} bytes, topic {topic} takes at most {limit}"
                    call.judged[place], topics_of[place] = Refused(reason), None
        call.topics = topics_of

    def _drain(self) -> None:
        """Wait until everything handed over has been reported on."""
        while self._outstanding:
            self._serve(ROOM_SECONDS)
            self._check()

    # -- trouble ----------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Find out which events a request failed for and refuse those; raises ``Halt`` when it is not about events."""
        wire = self._opened()
        self._blame()
        if wire.fatal is not None:
            wire.purge()
        self._drain()
        suspects = self._blame()
        if not suspects:
            raise Halt(wire.fatal or "Kafka's client gave records back")
        last = suspects[-1]
        suspected = [failure for failure in self._failures() if failure <= last]
        rest = [failure for failure in self._failures() if failure > last]
        self._isolate(suspected)
        for number, call in enumerate(self._calls):
            again = [place for at, place in rest if at == number]
            call.todo = [*again, *call.todo] if again else call.todo
            call.reports.failures.clear()

    def _failures(self) -> list[tuple[int, int]]:
        """The records that failed, in order: (number of the call, place)."""
        return sorted((number, place) for number, call in enumerate(self._calls) for place in call.reports.failures)

    def _blame(self) -> list[tuple[int, int]]:
        """Of the records that failed, those whose own fault it may be. Raises ``Halt`` when it is the destination's.

        What failed because the producer did is neither: it failed with a suspect, or there is none.
        """
        suspects: list[tuple[int, int]] = []
        for number, place in self._failures():
            error = self._calls[number].reports.failures[place]
            if kind(error) is Kind.MESSAGE:
                suspects.append((number, place))
            elif kind(error) is Kind.DESTINATION:
                raise Halt(self._told(self._calls[number], place, error))
        return suspects

    def _told(self, call: Call, place: int, error: KafkaError) -> str:
        return f"topic {call.topics[place]}: {self._settings.describe(error)}"

    def _isolate(self, failures: list[tuple[int, int]]) -> None:
        """Send records again in order, each alone: what fails alone is refused."""
        too_large = {
            topic
            for number, place in failures
            if self._calls[number].reports.failures[place].name() in TOO_LARGE
            and (topic := self._calls[number].topics[place]) is not None
        }
        self._drop_wire()
        self._open(ONE_AT_A_TIME)
        for number, place in failures:
            self._alone(self._calls[number], place)
        self._drop_wire()
        for topic in too_large:
            self._limits.doubt(topic)

    def _alone(self, call: Call, place: int) -> None:
        """Send one record and wait for its report. Raises ``Halt`` when it fails for another reason than itself."""
        if time.monotonic() >= call.until:
            raise Halt(LATE)
        failures = call.reports.failures
        del failures[place]
        wire = self._opened()
        if not wire.put(call, (place,)):
            call.lost = [*call.lost, place]
            raise Halt(wire.fatal or "Kafka's client has no room for a single record")
        self._drain()
        error = failures.get(place)
        if error is None:
            return
        if kind(error) is not Kind.MESSAGE:
            raise Halt(self._told(call, place, error))
        del failures[place]
        call.judged[place] = Refused(self._told(call, place, error))

    def _end(self, halt: Halt) -> None:
        """Take back everything under way; none of it can be sent any more when this returns."""
        reason = self._log.explain(str(halt))
        self._purge()
        self._limits.forget()
        for call in self._calls:
            call.course.ended = reason
            call.give_up()
            if call.outstanding:
                # Not reported even now, so nobody knows which: all of it counts as not delivered.
                call.lost = range(len(call.batch))
                call.sent = call.reports.count

    def _purge(self) -> None:
        if self._wire is None:
            return
        self._wire.purge()
        limit = time.monotonic() + PURGE_SECONDS
        while self._outstanding and time.monotonic() < limit:
            self._wire.poll(ROOM_SECONDS)
        self._drop_wire()

    def _drop_wire(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _opened(self) -> Wire:
        """The producer; a new one if there is none. Raises ``Halt`` for a client that does not start any more."""
        try:
            return self._wire or self._open()
        except KafkaException as exception:
            raise Halt(self._settings.describe(error_of(exception))) from exception

    def _open(self, extra: Mapping[str, Scalar] | None = None) -> Wire:
        self._wire = Wire(self._settings, self._log, self._limits.batch_bytes, extra)
        self._progress_at = time.monotonic()
        return self._wire
