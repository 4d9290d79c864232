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
from collections.abc import Callable
from operator import itemgetter
from typing import TypeAlias

from confluent_kafka import KafkaException

from outbox_relay.event import Event
from outbox_relay.policy import Refused
from outbox_relay.sinks.kafka.call import Call, Reports
from outbox_relay.sinks.kafka.client import ONE_AT_A_TIME, ClientLog, ClientSettings, error_of
from outbox_relay.sinks.kafka.errors import TOO_LARGE, Kind, kind
from outbox_relay.sinks.kafka.limits import Limits, NotReady
from outbox_relay.sinks.kafka.records import Topics
from outbox_relay.sinks.kafka.underway import ROOM_SECONDS, Halt, UnderWay

CHECK_EVERY = 100
"""Events handed over between two looks at the clock and the reports."""
SERVE_SECONDS = 0.001
"""How often reports are looked for while some are outstanding and no call comes."""
IDLE_SECONDS = 0.5
"""The same while none is: only the client's own errors and log lines are served then."""
LATE = "not handed to Kafka's client in time"
_PAYLOAD = itemgetter(Event._fields.index("payload"))

Job: TypeAlias = Callable[[], None]


class Lane:
    """Delivers the calls of one sink. ``put`` may be called from any thread, the jobs run in the lane's own.

    ``places`` is the most that a call may hold.
    """

    def __init__(self, name: str, settings: ClientSettings, topics: Topics, stall_seconds: float, places: int) -> None:
        self._settings = settings
        self._topics = topics
        self._stall_seconds = stall_seconds
        self._places = places
        self._log = ClientLog(settings)
        self._limits = Limits(settings, self._log)
        self._under_way = UnderWay(settings, self._log, self._limits, stall_seconds)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._spare: list[Reports] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kafka sink {name}", daemon=True)

    # -- from other threads -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the first producer and begin to take jobs. Raises KafkaException for settings that make none."""
        self._under_way.open()
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

    # -- jobs ---------------------------------------------------------------------------------------------------

    def take(self, call: Call) -> None:
        """Deliver ``call``."""
        self._under_way.calls.append(call)
        self._work()

    def withdraw(self, done: Job) -> None:
        """Take back all that was handed over, and call ``done`` once nothing of it can be sent any more."""
        if self._under_way.calls:
            self._end("withdrawn")
        done()

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
                logging.getLogger("outbox_relay.kafka").exception("the Kafka sink failed")
                self._end("the Kafka sink failed: see the log")

    def _next(self) -> Job:
        """The next job; until there is one, reports are served and stalls noticed."""
        while True:
            try:
                return self._jobs.get(timeout=SERVE_SECONDS if self._under_way.calls else IDLE_SECONDS)
            except queue.Empty:
                if self._under_way.wire is not None:
                    return self._work

    def _work(self) -> None:
        """Bring all calls as far as they go now, and answer those of which everything is known."""
        under_way = self._under_way
        try:
            under_way.serve()
            while True:
                if under_way.broken:
                    self._mend()
                elif call := next((call for call in under_way.calls if call.todo), None):
                    self._feed(call)
                else:
                    break
        except Halt as halt:
            self._end(str(halt))
        self._answer()

    def _answer(self) -> None:
        """Answer the calls that are complete, none before an earlier one."""
        while (call := self._under_way.complete()) is not None:
            call.answer(call.verdicts())
            call.reports.clear()
            self._spare.append(call.reports)

    def _end(self, reason: str) -> None:
        """Take back everything under way and answer it."""
        reason = self._log.explain(reason)
        self._under_way.take_back()
        self._limits.forget()
        for call in self._under_way.calls:
            call.course.ended = reason
            call.give_up()
            if call.outstanding:
                # Not reported even now, so nobody knows which: all of it counts as not delivered.
                call.lost = range(len(call.batch))
                call.sent = call.reports.count
        self._answer()

    # -- handing over -------------------------------------------------------------------------------------------

    def _feed(self, call: Call) -> None:
        """Hand over what is left of ``call``; returns early when a report shows a failure."""
        if call.course.ended is not None:
            call.give_up()
        elif self._prepared(call):
            self._hand_over(call)

    def _hand_over(self, call: Call) -> None:
        under_way, wire = self._under_way, self._under_way.opened()
        while call.todo and not under_way.broken:
            if time.monotonic() >= call.until:
                self._cut(call, LATE)
                return
            dealt = wire.put(call, call.todo[:CHECK_EVERY])
            if not dealt and not under_way.outstanding and wire.fatal is None:
                call.judged[call.todo[0]] = Refused("larger than the queue of Kafka's client (queue.buffering.max.*)")
                dealt = 1
            call.todo = call.todo[dealt:]
            under_way.serve(0.0 if dealt else ROOM_SECONDS)

    def _cut(self, call: Call, reason: str) -> None:
        """Hand over nothing more in this course; what was handed over is still waited for."""
        call.course.ended = self._log.explain(reason)
        call.give_up()

    def _prepared(self, call: Call) -> bool:
        """Learn what ``call`` needs to know of its topics; returns False when it cannot be fed now."""
        if time.monotonic() >= call.until:
            self._cut(call, LATE)
            return False
        if not call.topics:
            call.topics = self._topics.of(call.batch, call.judged)
        only = self._topics.constant
        topics = [only] if only is not None else sorted({topic for topic in call.topics if topic is not None})
        if not self._learned(call, topics) or not self._fits():
            return False
        self._refuse_too_large(call, topics)
        return True

    def _learned(self, call: Call, topics: list[str]) -> bool:
        """Ask about the topics not known yet; ends the course when one cannot take events."""
        unknown = self._limits.unknown(topics)
        if not unknown:
            return True
        try:
            self._limits.learn(unknown, min(self._stall_seconds, call.until - time.monotonic()))
        except NotReady as reason:
            self._cut(call, str(reason))
        except KafkaException as exception:
            self._cut(call, self._settings.describe(error_of(exception)))
        else:
            return True
        return False

    def _fits(self) -> bool:
        """Replace a producer whose batches are too large for a topic; returns False when that shows a failure."""
        if self._under_way.opened().batch_bytes > self._limits.batch_bytes:
            self._under_way.drain()
            if self._under_way.broken:
                return False
            self._under_way.drop()
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
                    reason = f"topic {topic}: MSG_SIZE_TOO_LARGE: {size} bytes, the topic takes at most {limit}"
                    call.judged[place], topics_of[place] = Refused(reason), None
        call.topics = topics_of

    # -- trouble ------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Find out which records a request failed for and refuse those; raises ``Halt`` when it is not about records.

        From the first record that failed to the last one that may have done so by its own fault, all that failed is
        sent again alone; what failed behind it is handed over again before anything else.
        """
        under_way = self._under_way
        self._suspects()
        under_way.drain()
        suspects = self._suspects()
        if not suspects:
            fatal = under_way.wire.fatal if under_way.wire is not None else None
            raise Halt(fatal or "Kafka's client gave records back")
        failures = under_way.failures()
        alone = [failure for failure in failures if failure <= suspects[-1]]
        self._isolate(alone)
        for number, call in enumerate(under_way.calls):
            again = [place for at, place in failures[len(alone) :] if at == number]
            call.todo = [*again, *call.todo] if again else call.todo
            call.reports.failures.clear()

    def _suspects(self) -> list[tuple[int, int]]:
        """Of the records that failed, those whose own fault it may be. Raises ``Halt`` when it is the destination's.

        What failed because the producer did is neither: it failed with a suspect, or there is none.
        """
        suspects: list[tuple[int, int]] = []
        for number, place in self._under_way.failures():
            error = self._under_way.failure(number, place)
            if kind(error) is Kind.MESSAGE:
                suspects.append((number, place))
            elif kind(error) is Kind.DESTINATION:
                raise Halt(self._under_way.told(self._under_way.calls[number], place, error))
        return suspects

    def _isolate(self, failures: list[tuple[int, int]]) -> None:
        """Send records again in order, each alone: what fails alone is refused."""
        calls = self._under_way.calls
        too_large = [at for at in failures if self._under_way.failure(*at).name() in TOO_LARGE]
        self._under_way.replace(ONE_AT_A_TIME)
        for number, place in failures:
            self._alone(calls[number], place)
        self._under_way.drop()
        # What fits when it is alone was in a batch too large for the topic.
        for topic in {calls[number].topics[place] for number, place in too_large if place not in calls[number].judged}:
            self._limits.doubt(topic)

    def _alone(self, call: Call, place: int) -> None:
        """Send one record and wait for its report. Raises ``Halt`` when it fails for another reason than itself."""
        if time.monotonic() >= call.until:
            raise Halt(LATE)
        failures, wire = call.reports.failures, self._under_way.opened()
        del failures[place]
        if not wire.put(call, (place,)):
            call.lost = [*call.lost, place]
            raise Halt(wire.fatal or "Kafka's client has no room for a single record")
        self._under_way.drain()
        error = failures.get(place)
        if error is None:
            return
        reason = self._under_way.told(call, place, error)
        if kind(error) is not Kind.MESSAGE:
            raise Halt(reason)
        del failures[place]
        call.judged[place] = Refused(reason)
