"""The calls under way and the producer that their records are on. Used by one thread only; most of it blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException

from outbox_relay.sinks.kafka.call import Call
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings, Scalar, error_of
from outbox_relay.sinks.kafka.limits import Limits
from outbox_relay.sinks.kafka.wire import Wire

ROOM_SECONDS = 0.05
"""One wait for reports, or for the room that they make, when nothing else can be done."""
PURGE_SECONDS = 5.0
"""Longest wait for the reports of purged records; this process makes them itself, so they come at once."""
NAMED_TOPICS = 3
"""Topics that a reason names at most."""


class Halt(Exception):
    """Nothing more can be delivered now: what is under way is taken back. The message says why."""


class UnderWay:
    """Serves the reports of all calls under way, and notices when none come any more.

    ``calls`` are in the order in which they were made; the records of each were handed over before those of the
    next.
    """

    def __init__(self, settings: ClientSettings, log: ClientLog, limits: Limits, stall_seconds: float) -> None:
        self.calls: deque[Call] = deque()
        self.wire: Wire | None = None
        self._settings = settings
        self._log = log
        self._limits = limits
        self._stall_seconds = stall_seconds
        self._reported = 0
        self._progress_at = 0.0

    @property
    def outstanding(self) -> int:
        """Records handed over and not reported on."""
        return sum(call.outstanding for call in self.calls)

    @property
    def broken(self) -> bool:
        """Whether a record failed or the producer is dead."""
        dead = self.wire is not None and self.wire.fatal is not None
        return dead or any(call.reports.failures for call in self.calls)

    def serve(self, seconds: float = 0.0) -> None:
        """Serve delivery reports; when there is none, wait up to ``seconds`` for one.

        Raises ``Halt`` when what is under way must not be waited for any longer.
        """
        if self.wire is not None:
            self.wire.poll(seconds)
        reported = sum(call.reports.count for call in self.calls)
        if reported > self._reported:
            self._log.last_error = None
        if reported != self._reported or not self.outstanding:
            self._progress_at = time.monotonic()
        self._reported = reported
        if self.calls:
            self._check(time.monotonic())

    def _check(self, now: float) -> None:
        if any(call.course.withdrawn and not call.complete for call in self.calls):
            raise Halt("withdrawn")
        if now - self._progress_at > self._stall_seconds:
            raise Halt(f"{self._of_topics()}no acknowledgement for {self._stall_seconds:g} s")
        if now > self.calls[0].deadline:
            raise Halt(f"{self._of_topics()}a batch was not acknowledged in time")

    def _of_topics(self) -> str:
        """The topics of the calls under way, as the beginning of a reason."""
        topics = sorted({topic for call in self.calls for topic in call.topics if topic is not None})
        named = ", ".join(topics[:NAMED_TOPICS]) + (", …" if len(topics) > NAMED_TOPICS else "")
        return f"topic {named}: " if topics else ""

    def drain(self) -> None:
        """Wait until everything handed over has been reported on. Raises ``Halt`` as ``serve`` does."""
        while self.outstanding:
            if self.wire is not None and self.wire.fatal is not None:
                # A dead producer sends nothing more, and keeps what a failed request puts back.
                self.wire.purge(in_flight=False)
            self.serve(ROOM_SECONDS)

    def failures(self) -> list[tuple[int, int]]:
        """The records that failed, in the order of handing over: number of the call, place."""
        return sorted((number, place) for number, call in enumerate(self.calls) for place in call.reports.failures)

    def failure(self, number: int, place: int) -> KafkaError:
        """Why the record at ``place`` of call ``number`` failed."""
        return self.calls[number].reports.failures[place]

    def told(self, call: Call, place: int, error: KafkaError) -> str:
        """``error`` of a record, for people."""
        return f"topic {call.topics[place]}: {self._settings.describe(error)}"

    def complete(self) -> Call | None:
        """Takes away the first call if all is known of it: nothing for as long as an earlier one is not complete."""
        if not self.calls or not self.calls[0].complete:
            return None
        call = self.calls.popleft()
        self._reported -= call.reports.count
        return call

    def opened(self) -> Wire:
        """The producer; a new one if there is none. Raises ``Halt`` for a client that does not start any more."""
        return self.wire or self.replace()

    def replace(self, extra: Mapping[str, Scalar] | None = None) -> Wire:
        """A new producer with ``extra`` settings, in place of the old one. Raises ``Halt`` as ``opened`` does."""
        try:
            return self.open(extra)
        except KafkaException as exception:
            raise Halt(self._settings.describe(error_of(exception))) from exception

    def open(self, extra: Mapping[str, Scalar] | None = None) -> Wire:
        """Do as ``replace`` does, but raise the client's own KafkaException."""
        self.drop()
        self.wire = Wire(self._settings, self._log, self._limits.batch_bytes, extra)
        self._progress_at = time.monotonic()
        return self.wire

    def drop(self) -> None:
        """End the producer, if there is one, and whatever it holds."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def take_back(self) -> None:
        """Purge the producer, serve every report of it, and end it: nothing of it can be sent any more."""
        if self.wire is None:
            return
        self.wire.purge(in_flight=True)
        limit = time.monotonic() + PURGE_SECONDS
        while self.outstanding and time.monotonic() < limit:
            self.wire.poll(ROOM_SECONDS)
        self.drop()
