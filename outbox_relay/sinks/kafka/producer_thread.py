"""The thread of a Kafka sink. It takes calls in order, hands over their events and answers with verdicts.

Only this thread uses the producers, and it serves the delivery reports between handing over records. So no two threads
compete for the interpreter record by record.

These rules keep the order and lose nothing:

- librdkafka never gives up a record by itself. When acknowledgements stop, all records are purged, all reports are
  served, and the producers are replaced. Unacknowledged events are ``Unavailable``, so the acknowledged records are a
  prefix per partition.
- A request that fails for good ends its producer (``enable.gapless.guarantee``), so no later record overtakes. A new
  producer begins with one event of each key (``new_producer_guard``). The events in flight are then sent again in
  order, up to the last suspect one at a time. Only an event that fails alone is ``Refused``.
- A topic that accepts no events does not hold back other topics. Except for occasional probes its events are
  ``Unavailable`` without being sent.
- A call is answered after all earlier ones. In its verdicts no delivered event follows an unavailable one of its key.
- Where dead letters hold their key, no event of the key is handed over after a refused event. Records that failed in
  the same request, or after it, are sent again only when the refused one is known: by then its key is blocked.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.sinks.kafka.call import DeliverCall, DeliveryReports, DeliveryRound, KeyBlocks
from outbox_relay.sinks.kafka.call_preparation import CallPreparation
from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.context import LATE, ThreadContext
from outbox_relay.sinks.kafka.event_schemas import EventSchemas
from outbox_relay.sinks.kafka.failure_recovery import FailureRecovery
from outbox_relay.sinks.kafka.in_flight_messages import (
    WAIT_SECONDS,
    DeliveryHalted,
    DeliveryStalled,
    InFlightMessages,
)
from outbox_relay.sinks.kafka.new_producer_guard import NewProducerGuard
from outbox_relay.sinks.kafka.records import RecordFormat
from outbox_relay.sinks.kafka.send_filter import SendFilter
from outbox_relay.sinks.kafka.tokens import TokenUnavailable
from outbox_relay.sinks.kafka.topic_breakers import TopicBreakers
from outbox_relay.sinks.kafka.topic_metadata import TopicCreation, TopicMetadata
from outbox_relay.sinks.kafka.topic_resolver import TopicResolver

CHECK_EVERY = 100
"""Number of events handed over between two checks of the clock and the reports."""
SERVE_SECONDS = 0.001
"""One wait for reports while calls are open and no job arrives."""
IDLE_SECONDS = 0.5
"""The same while no call is open: only errors and log lines of the client are served then."""

Job: TypeAlias = Callable[[], None]


class ProducerThread:
    """Delivers the calls of one sink. ``put`` may be called from any thread; jobs run in the producer thread.

    A call has at most ``max_batch`` events. With ``hold_keys`` a refused event blocks later events of its key.
    """

    def __init__(
        self,
        name: str,
        settings: ClientSettings,
        topics: TopicResolver,
        stall_seconds: float,
        max_batch: int,
        record_format: RecordFormat,
        creation: TopicCreation | None,
        *,
        hold_keys: bool,
        schemas: EventSchemas | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._max_batch = max_batch
        self._log = ClientLog(settings, name)
        self._blocks = KeyBlocks()
        self._refusal_blocks = self._blocks if hold_keys else None
        self._in_flight = InFlightMessages(settings, self._log, record_format, stall_seconds)
        self._metadata = TopicMetadata(settings, self._log, creation)
        breakers = TopicBreakers()
        self._filter = SendFilter(self._blocks, breakers, self._metadata)
        context = ThreadContext(
            settings, self._log, topics, record_format, stall_seconds,
            self._metadata, breakers, self._blocks, self._in_flight, self._filter, schemas,
        )  # fmt: skip
        self._preparation = CallPreparation(context)
        self._recovery = FailureRecovery(context)
        # Not a SimpleQueue: before Python 3.13 its get() never returns if its time runs out between two checks.
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._spare_reports: list[DeliveryReports] = []
        self._outdated = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kafka sink {name}", daemon=True)

    # -- called from other threads ------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the first producer and start the thread.

        Raise KafkaException for settings that librdkafka does not accept, and ``ConfigurationError`` for a file that
        cannot be used.
        """
        with contextlib.suppress(TokenUnavailable):  # the first call opens another one
            self._in_flight.open_producer(self._metadata.max_batch_bytes)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Run ``job`` in the thread, after the earlier ones."""
        self._jobs.put(job)

    def join(self) -> None:
        """Wait until the thread has ended, which the job ``stop`` causes. Blocks."""
        self._thread.join()

    def new_call(
        self,
        number: int,
        batch: Sequence[StoredEvent],
        until: float,
        deadline: float,
        delivery_round: DeliveryRound,
        answer: Callable[[Sequence[Verdict]], None],
        *,
        with_details: bool = False,
        has_rows: bool = False,
    ) -> DeliverCall:
        """Return a new call, to be passed to ``take``.

        The verdicts of delivered events have partition and offset with ``with_details``.
        """
        reports = self._spare_reports.pop() if self._spare_reports else DeliveryReports(self._max_batch)
        if with_details:
            reports.collect_acknowledgements()
        return DeliverCall(
            *(number, batch, until, deadline, delivery_round, answer, reports, self._refusal_blocks),
            has_rows=has_rows,
        )

    @property
    def trouble(self) -> str | None:
        """Return why no broker is reachable, or what delays acknowledgements, or None."""
        return self._log.trouble or self._log.throttle or self._in_flight.waits_for

    def extend(self, until: float) -> None:
        """Let calls with events of the log last until the ``lease_clock()`` value ``until``."""
        self._in_flight.lease_until = until

    # -- jobs ---------------------------------------------------------------------------------------------------

    def take(self, call: DeliverCall) -> None:
        """Deliver ``call``."""
        self._in_flight.calls.append(call)
        self._blocks.prune(self._in_flight.calls[0].number)
        self._work()

    def withdraw(self, done: Job) -> None:
        """Purge all records, and call ``done`` when none of them can be sent any more."""
        if self._in_flight.calls:
            self._end_calls("withdrawn")
        done()

    def use_settings(self, settings: ClientSettings) -> None:
        """Replace every producer by one with ``settings`` before another event is handed over."""
        self._settings.adopt(settings)
        self._outdated = True
        self._work()

    def stop(self) -> None:
        """End the thread."""
        self.withdraw(self._in_flight.close)
        self._stopped = True

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            job = self._next_job()
            try:
                job()
            except Exception:
                # The callers must get their verdicts, and the next call begins with a new producer.
                logging.getLogger("outbox_relay.kafka").exception("kafka.failed", extra={"sink": self._name})
                self._end_calls("the Kafka sink failed: see the log")

    def _next_job(self) -> Job:
        """Return the next job, or one that serves reports and detects stalls."""
        is_open = bool(self._in_flight.calls)
        try:
            return self._jobs.get(block=not is_open, timeout=IDLE_SECONDS)
        except queue.Empty:
            return partial(self._work, SERVE_SECONDS if is_open else 0.0)

    def _work(self, seconds: float = 0.0) -> None:
        """Wait up to ``seconds`` for reports, advance all calls, and answer the complete ones."""
        while True:
            try:
                self._advance(seconds)
            except DeliveryStalled as stalled:
                if self._recovery.recover_from_stall():
                    continue
                self._end_calls(str(stalled))
            except DeliveryHalted as halted:
                self._end_calls(str(halted))
            break
        self._answer()

    def _advance(self, seconds: float) -> None:
        in_flight = self._in_flight
        in_flight.serve(seconds)
        while True:
            if in_flight.failed:
                self._recovery.recover()
            elif self._outdated:
                self._replace_producers()
            elif call := next((call for call in in_flight.calls if call.pending), None):
                self._process(call)
            else:
                break

    def _replace_producers(self) -> None:
        """Close the producers once all their records have reports, so that no record overtakes."""
        self._in_flight.drain()
        if not self._in_flight.failed:
            self._in_flight.close()
            self._reset()

    def _reset(self) -> None:
        """Discard what was known with the closed producers."""
        self._preparation.reset()
        self._outdated = False

    def _answer(self) -> None:
        """Answer the complete calls, none before an earlier one."""
        while (call := self._in_flight.pop_complete()) is not None:
            self._filter.end_probes(call)
            call.answer(call.verdicts(self._blocks))
            call.reports.clear()
            self._spare_reports.append(call.reports)

    def _end_calls(self, reason: str) -> None:
        """Purge all records and answer all calls."""
        reason = self._log.explain(reason)
        self._in_flight.purge()
        self._reset()
        for call in self._in_flight.calls:
            call.end_round(reason)
            call.abandon_unreported()
        self._answer()

    # -- handing over -------------------------------------------------------------------------------------------

    def _process(self, call: DeliverCall) -> None:
        """Prepare ``call`` and hand over its events, or abandon them if its round has ended."""
        if call.round.end_reason is not None:
            call.abandon_pending()
        elif self._preparation.prepare(call):
            self._hand_over(call)

    def _hand_over(self, call: DeliverCall) -> None:
        """Hand over the pending events of ``call``, until a report shows a failure."""
        in_flight = self._in_flight
        in_flight.extend(call, lease_clock())
        while call.pending and not in_flight.failed:
            if lease_clock() >= call.until:
                call.end_round(self._log.explain(LATE))
                return
            batch_size, indexes = _next_run(call)
            producer, block_count = in_flight.producer(batch_size), len(call.blocks)
            guard = producer.guard
            if guard is not None and guard.is_open(call, indexes):
                guard = None
            if guard is not None and not (indexes := self._sendable(guard, call, indexes)):
                continue
            dealt = producer.put(call, indexes)
            if guard is not None:
                guard.record_sent(call, indexes[:dealt])
            if not dealt and lease_clock() >= call.until:
                continue
            if not dealt and not in_flight.outstanding and producer.fatal is None:
                call.refuse(call.pending[0], "larger than the queue of Kafka's client (queue.buffering.max.*)")
                dealt = 1
            call.set_pending(call.pending[dealt:])
            if len(call.blocks) > block_count:
                self._filter.filter_pending(call)
            in_flight.serve(0.0 if dealt else WAIT_SECONDS)

    def _sendable(self, guard: NewProducerGuard, call: DeliverCall, indexes: Sequence[int]) -> Sequence[int]:
        """Return the indexes that a new producer may send now. Without any, wait for acknowledgements."""
        call.reports.collect_partitions(guard.partitions)
        if sendable := guard.sendable(call, indexes):
            return sendable
        self._in_flight.drain()
        if not self._in_flight.failed:
            guard.record_acknowledged(self._metadata.partitions)
        return ()


def _next_run(call: DeliverCall) -> tuple[int, Sequence[int]]:
    """Return the next pending indexes for one producer, and its batch size."""
    indexes = call.pending[:CHECK_EVERY]
    if isinstance(call.batch_sizes, int):
        return call.batch_sizes, indexes
    size = call.batch_sizes[indexes[0]]
    end = next((n for n, index in enumerate(indexes) if call.batch_sizes[index] != size), len(indexes))
    return size, indexes[:end]
