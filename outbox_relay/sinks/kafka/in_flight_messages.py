"""The calls under way and the producers that their records are on. Used by one thread only; most of it blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from confluent_kafka import KafkaError, KafkaException

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.sinks.kafka.call import DeliverCall
from outbox_relay.sinks.kafka.client import ONE_AT_A_TIME, ClientLog, ClientSettings, error_of
from outbox_relay.sinks.kafka.producer import RecordProducer
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.statistics import NOTHING, Statistics, ended, together

CAREFUL = 0
"""The producer of records that are sent alone, among those that are told by the size of their batches."""
ROOM_SECONDS = 0.05
"""One wait for reports, or for the room that they make, when nothing else can be done."""
TURN_SECONDS = 0.002
"""The same for each of several producers: while one is waited for, another may have news."""
PURGE_SECONDS = 5.0
"""Longest wait for the reports of purged records; this process makes them itself, so they come at once."""
NAMED_TOPICS = 3
"""Topics that a reason names at most."""


class DeliveryHalted(Exception):
    """Nothing more can be delivered now: what is under way is taken back. The message says why."""


class DeliveryStalled(DeliveryHalted):
    """Acknowledgements have stopped."""


class InFlightMessages:
    """Serves the reports of all calls under way, and notices when none come any more.

    ``calls`` are in the order in which they were made; the records of each were handed over before those of the
    next. A topic's records are all on one producer, but for those that are sent alone.
    """

    def __init__(self, settings: ClientSettings, log: ClientLog, form: RecordFormat, stall_seconds: float) -> None:
        self.calls: deque[DeliverCall] = deque()
        self._wires: dict[int, RecordProducer] = {}
        self._settings = settings
        self._log = log
        self._form = form
        self._stall_seconds = stall_seconds
        self._reported = 0
        self._progress_at = 0.0
        self._counted = NOTHING

    @property
    def statistics(self) -> Statistics:
        """What the client counts about all producers, those that were replaced too. May be asked by any thread."""
        return together([self._counted, *(wire.statistics for wire in list(self._wires.values()))])

    @property
    def outstanding(self) -> int:
        """Records handed over and not reported on."""
        return sum(call.outstanding for call in self.calls)

    @property
    def fatal(self) -> str | None:
        """The error after which a producer is dead, if one is."""
        return next((wire.fatal for wire in self._wires.values() if wire.fatal is not None), None)

    @property
    def broken(self) -> bool:
        """Whether a record failed or a producer is dead."""
        return self.fatal is not None or any(call.reports.failures for call in self.calls)

    def serve(self, seconds: float = 0.0) -> None:
        """Serve the delivery reports that are there, or wait up to ``seconds`` for some: meanwhile no record lingers.

        Raises ``DeliveryHalted`` when what is under way must not be waited for any longer.
        """
        turn = seconds if len(self._wires) < 2 else min(seconds, TURN_SECONDS)
        for wire in self._wires.values():
            if turn:
                wire.hurry(turn)
            else:
                wire.poll(0.0)
        reported = sum(call.reports.count for call in self.calls)
        if reported > self._reported:
            self._log.answered()
        if reported != self._reported or not self.outstanding:
            self._progress_at = time.monotonic()
        self._reported = reported
        if self.calls:
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        if any(call.course.withdrawn and not call.complete for call in self.calls):
            raise DeliveryHalted("withdrawn")
        if now - self._progress_at > self._stall_seconds:
            raise DeliveryStalled(f"{self._of_topics()}no acknowledgement for {self._stall_seconds:g} s")
        if now > self.calls[0].deadline:
            raise DeliveryHalted(f"{self._of_topics()}a batch was not acknowledged in time")

    def topics(self) -> list[str]:
        """The topics of the calls under way, in alphabetical order."""
        return sorted({topic for call in self.calls for topic in call.topics if topic is not None})

    def _of_topics(self) -> str:
        """The topics of the calls under way, as the beginning of a reason."""
        topics = self.topics()
        named = ", ".join(topics[:NAMED_TOPICS]) + (", …" if len(topics) > NAMED_TOPICS else "")
        return f"topic {named}: " if topics else ""

    def drain(self) -> None:
        """Wait until everything handed over has been reported on. Raises ``DeliveryHalted`` as ``serve`` does."""
        while self.outstanding:
            for wire in self._wires.values():
                if wire.fatal is not None:
                    # A dead producer sends nothing more, and keeps what a failed request puts back.
                    wire.purge(in_flight=False)
            self.serve(ROOM_SECONDS)

    def failures(self) -> list[tuple[int, int]]:
        """The records that failed, in the order of handing over: number of the call, place."""
        return sorted((number, place) for number, call in enumerate(self.calls) for place in call.reports.failures)

    def failure(self, number: int, place: int) -> KafkaError:
        """Why the record at ``place`` of call ``number`` failed."""
        return self.calls[number].reports.failures[place]

    def told(self, call: DeliverCall, place: int, error: KafkaError) -> str:
        """``error`` of a record, for people."""
        return f"topic {call.topics[place]}: {self._settings.describe(error)}"

    def complete(self) -> DeliverCall | None:
        """Takes away the first call if all is known of it: nothing for as long as an earlier one is not complete."""
        if not self.calls or not self.calls[0].complete:
            return None
        call = self.calls.popleft()
        self._reported -= call.reports.count
        return call

    def wire(self, size: int) -> RecordProducer:
        """The producer of batches of ``size``; a new one if there is none. Raises ``DeliveryHalted`` when none can be made."""
        found = self._wires.get(size)
        if found is not None:
            return found
        try:
            return self.open(size)
        except KafkaException as exception:
            raise DeliveryHalted(self._settings.describe(error_of(exception))) from exception
        except Misconfigured as reason:
            raise DeliveryHalted(str(reason)) from None

    def open(self, size: int) -> RecordProducer:
        """Do as ``wire`` does, but raise the client's own KafkaException, or ``Misconfigured``."""
        extra = ONE_AT_A_TIME if size == CAREFUL else None
        wire = RecordProducer(self._settings, self._log, self._form, size or self._settings.batch_bytes, extra)
        self._wires[size] = wire
        self._progress_at = time.monotonic()
        return wire

    def sizes(self) -> list[int]:
        """The producers there are, by the size of their batches, without that of records that are sent alone."""
        return [size for size in self._wires if size != CAREFUL]

    def drop_dead(self) -> None:
        """End the producers that are dead, and whatever they hold."""
        self.drop(size for size, wire in list(self._wires.items()) if wire.fatal is not None)

    def drop(self, sizes: Iterable[int] | None = None) -> None:
        """End producers, all of them unless told which, and whatever they hold."""
        for size in list(self._wires) if sizes is None else sizes:
            wire = self._wires.pop(size)
            self._counted = together([self._counted, ended(wire.statistics)])
            wire.close()
        if not self._wires:
            self._log.forget()

    def take_back(self) -> None:
        """Purge the producers, serve every report of them, and end them: nothing of them can be sent any more."""
        for wire in self._wires.values():
            wire.purge(in_flight=True)
        limit = time.monotonic() + PURGE_SECONDS
        while self._wires and self.outstanding and time.monotonic() < limit:
            for wire in self._wires.values():
                wire.poll(TURN_SECONDS)
        self.drop()
