"""A relay process in steps: the product's own parts and sessions, without their loops.

What the loops would do at some time is done when the test says so, a statement at a time (see ``scheduler``). Its
destination answers when the test says so. Time passes when the test says so: a lease ends for the worker before it
ends in the database, and what the worker had not handed over by then is not handed over any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from uuid import UUID

from structlog import DropEvent
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Failed, Unavailable, Verdict
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.log_reader import LogReader
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.parked_claims import ParkedClaims
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.session import Session
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.relay.sink_report import SinkReport
from outbox_relay.relay.ticker import Ticker
from tests.property.expected import Expected
from tests.property.scheduler import LANE, Bench, Scheduler, SteppedStore
from tests.support.memory_sink import MemorySink

LEASE_SECONDS = 7200.0
"""So long that no lease ends by itself."""
OF_THE_PROCESS = frozenset({"own", "stop", "leave"})
"""The lanes of work outside of sessions."""
NEVER, ALWAYS = float("-inf"), float("inf")

LAPSED = """
update outbox.shard set lease_until = clock_timestamp() - %s * interval '1 hour' where sink = %s and owner = %s"""
UNSEEN = "update outbox.relay set seen_at = clock_timestamp() - interval '1 day' where id = %s"
ROWS_LAPSED = """
update outbox.delivery set lease_until = clock_timestamp() - interval '1 second' where sink = %s and owner = %s"""


def drop(_logger: object, _level: str, _line: EventDict) -> EventDict:
    """Drop every log line."""
    raise DropEvent


SILENT = BoundLogger(None, [drop], {})


class SteppedLeaseManager(LeaseManager):
    """A round is always one that renews."""

    async def renew_and_claim(self) -> None:
        """Renew and claim once, a third of a lease after the last time."""
        self._renewed_at = NEVER
        await self.round()


async def for_ever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


class SteppedSettler(Settler):
    """Settles when told."""

    async def run(self) -> None:
        """Do nothing by itself."""
        await for_ever()


class SteppedParkedLimit(ParkedLimit):
    """Never counts rows in the database."""

    async def run(self) -> None:
        """Do nothing by itself."""
        await for_ever()


class SteppedSinkReport(SinkReport):
    """Records nothing for people."""

    async def run(self) -> None:
        """Do nothing by itself."""
        await for_ever()


class SteppedParkedClaims(ParkedClaims):
    """Looks for rows of crashed relays when told."""

    def sweep(self, *, now: bool) -> None:
        """Let the next claim look at the heads of all keys, or not."""
        self._swept_at = self._suspected_at = NEVER if now else ALWAYS


class SteppedParkedDeliveries(ParkedDeliveries):
    """Steps of the loops of ``ParkedDeliveries``, each done once by a call."""

    _claims: SteppedParkedClaims
    _tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Settle rows whose request is under way; nothing else by itself."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._slow_deliveries.run(self._tasks))
            await for_ever()

    async def claim(self, *, sweep: bool) -> None:
        """Claim once, the heads of all keys too if ``sweep``, and make the deliveries that follow."""
        self._claims.sweep(now=sweep)
        if self._context.leases.serving and self._tasks is not None:
            await self._claim_and_deliver(self._tasks)

    async def settle(self) -> None:
        """Write what has come."""
        await self._settler.settle()

    async def unblock(self) -> None:
        """Ask once which keys are free."""
        await self._settler.unblock_once()


@dataclass
class Steps:
    """The session of a worker, and the tasks of its steps."""

    tasks: asyncio.TaskGroup
    settler: Settler
    log_reader: LogReader
    parked: SteppedParkedDeliveries


@dataclass
class SteppedRelay(SinkRelay):
    """The product's session, whose loop is the test."""

    steps: Steps | None = None

    async def _claim_deliver_settle(self, session: Session) -> bool:
        assert isinstance(session.settler, SteppedSettler)
        assert isinstance(session.parked, SteppedParkedDeliveries)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.steps = Steps(tasks, session.settler, session.log_reader, session.parked)
                await for_ever()
        finally:
            self.steps = None
        return False


@contextmanager
def in_steps() -> Generator[None]:
    """Inside, sessions are made of parts whose loops do nothing by themselves."""
    parts: dict[str, Any] = {
        "Settler": SteppedSettler,
        "ParkedLimit": SteppedParkedLimit,
        "SinkReport": SteppedSinkReport,
        "ParkedDeliveries": SteppedParkedDeliveries,
    }
    with (
        patch.multiple("outbox_relay.relay.session", **parts),
        patch("outbox_relay.relay.parked.ParkedClaims", SteppedParkedClaims),
        patch("outbox_relay.relay.earlier_outcomes.LOOK_SECONDS", 0.0),
    ):
        yield


class Worker:
    """One relay process. ``number`` makes its id; ``expected`` is asked for what its destination answers."""

    def __init__(
        self, bench: Bench, number: int, spec: SinkSpec, generation: int, expected: Expected, *, keeps_order: bool
    ) -> None:
        self._bench = bench
        self._sink_name = spec.name
        self._expected = expected
        self.id = UUID(int=number)
        self.scheduler = Scheduler()
        self.store = store = SteppedStore(bench, spec.name, self.scheduler)
        self.ticker = ticker = Ticker(store, CommitListener(None), LEASE_SECONDS, SILENT)
        self.lease_manager = lease_manager = SteppedLeaseManager(store, self.id, "worker", "0", LEASE_SECONDS, SILENT)
        self.leases = lease_manager.add(spec.name, generation)
        self.sink = sink = MemorySink(lambda event, _: self._asked(event), keeps_order=keeps_order, holds=spec.hold)
        self.relay = SteppedRelay(
            *(spec, sink, store, ticker, lease_manager, self.leases, SILENT, asyncio.Event()), noise=lambda: 0.0
        )
        self.stopped = False
        """Return True if it is stopping: it drains, and leaves when it owns no shard."""
        self.sessions_ended = 0
        self.errors: list[BaseException] = []
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._requests: list[tuple[StoredEvent, asyncio.Future[Verdict]]] = []
        self._wish: str | None = None

    # -- the destination ----------------------------------------------------------------------------------------

    async def _asked(self, event: StoredEvent) -> Verdict:
        """Ask the destination to take ``event``: it answers when the test says what."""
        if self._wish is not None:
            return self._expected.answer(event, self._wish)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._requests.append((event, answer))
        try:
            return await answer
        finally:
            self._requests = [request for request in self._requests if request[1] is not answer]

    async def answer(self, wish: str, place: int) -> bool:
        """Let the destination answer one of the open requests; return True if there was one."""
        if not self._requests:
            return False
        event, answer = self._requests[place % len(self._requests)]
        answer.set_result(self._expected.answer(event, wish))
        await self.scheduler.still()
        return True

    async def end_requests(self) -> None:
        """End every open request without its having reached the destination; it may be made again."""
        keeps_order = self.sink.keeps_order
        for _, answer in list(self._requests):
            if not answer.done():
                answer.set_result(Unavailable("not handed over in time") if keeps_order else Failed("timed out"))
            await self.scheduler.still()

    # -- in steps ------------------------------------------------------------------------------------------------

    async def do(self, what: str, turns: int | None = None) -> None:
        """Begin ``what``, or go on with it if it was begun: as many statements as ``turns``, or all (None)."""
        if self.session is None and what not in OF_THE_PROCESS:
            if not self.busy("session"):
                self._begin("session", self._serve())
            await self.go_on("session")
        if not self.busy(what):
            self._start(what)
        await self.go_on(what, turns)

    def _start(self, what: str) -> None:
        if what in OF_THE_PROCESS:
            process = {"own": self.lease_manager.renew_and_claim, "stop": self._stop, "leave": self.lease_manager.leave}
            self._begin(what, process[what]())
        elif self.session is not None:
            work = self._once(what, self.session)()
            try:
                self._begin(what, work, self.session.tasks)
            except RuntimeError as error:
                if "shutting down" not in str(error):
                    raise
                work.close()  # the session has begun to end; the next step begins another

    async def _stop(self) -> None:
        await self.lease_manager.stop()
        self.stopped = True

    def _once(self, what: str, session: Steps) -> Callable[[], Coroutine[Any, Any, None]]:
        async def read() -> None:
            session.log_reader.want_tick()
            await self.ticker.refresh()
            await session.log_reader.adopt()
            await session.log_reader.step()

        async def forward() -> None:
            await session.settler.flush(everything=True)

        async def claim() -> None:
            await session.parked.claim(sweep=False)

        async def sweep() -> None:
            await session.parked.claim(sweep=True)

        return {
            "read": read,
            "settle": session.settler.flush,
            "forward": forward,
            "claim": claim,
            "sweep": sweep,
            "settle rows": session.parked.settle,
            "unblock": session.parked.unblock,
        }[what]

    def busy(self, lane: str) -> bool:
        """Return True if work was begun in ``lane`` and is not done."""
        return lane in self._lanes and not self._lanes[lane].done()

    async def go_on(self, lane: str, turns: int | None = None) -> None:
        """Give ``lane`` this number of turns, or as many as it takes."""
        await self.scheduler.still()
        given = 0
        while given != turns and await self.scheduler.give(lane):
            given += 1
        self._collect()

    def _begin(self, lane: str, what: Coroutine[Any, Any, None], parts: asyncio.TaskGroup | None = None) -> None:
        self._collect()
        context = copy_context()
        context.run(LANE.set, lane)
        create: Any = parts.create_task if parts else asyncio.get_running_loop().create_task
        self._lanes[lane] = create(what, context=context)

    def _collect(self) -> None:
        """Return the errors of lanes that are done."""
        for lane, task in list(self._lanes.items()):
            if task.done():
                del self._lanes[lane]
                if not task.cancelled() and (error := task.exception()) and not isinstance(error, SessionReset):
                    self.errors.append(error)

    async def _serve(self) -> None:
        try:
            await self.relay.run()
        finally:
            self.sessions_ended += 1

    @property
    def session(self) -> Steps | None:
        """Return its state in memory while a session is under way."""
        return self.relay.steps

    # -- what happens to a process ------------------------------------------------------------------------------

    async def lose_leases(self, hours: int) -> None:
        """Let renewals fail and the leases end ``hours`` ago: here first, then in the database."""
        await self.end_requests()
        for shard, lease in self.leases.held.items():
            self.leases.confirm(shard, lease.epoch, 0.0)
        await self.end_requests()
        await self._bench.end_held()
        await self._bench.ask(LAPSED + " returning 1", hours, self._sink_name, self.id)
        await self._bench.ask(UNSEEN + " returning 1", self.id)

    async def lose_row_leases(self) -> None:
        """End the leases of the rows that are being delivered, after their requests."""
        await self.end_requests()
        await self._bench.end_held()
        await self._bench.ask(ROWS_LAPSED + " returning 1", self._sink_name, self.id)

    async def crash(self, *, commits_are_lost: bool = False) -> None:
        """End the process; what it had sent to the database is done, or not."""
        self.store.commits_are_lost = commits_are_lost
        tasks = list(self._lanes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.scheduler.still()
        self._lanes.clear()

    async def run_freely(self) -> None:
        """Let nothing wait for a turn from now on, and the destination take what comes."""
        self.scheduler.free = True
        self._wish = "taken"
        for turn in list(self.scheduler.waiting.values()):
            turn.set_result(None)
        while self._requests:
            await self.answer("taken", 0)
        await self.scheduler.still()
        self._collect()

    async def finish(self, what: str) -> None:
        """Do ``what`` to its end; for a worker that runs freely.

        A claim does not end while the session hands its shards over: the next read ends the session.
        """
        await self.do(what)
        if self.busy(what) and not self._hands_over:
            await asyncio.wait({self._lanes[what]}, timeout=5)
            assert not self.busy(what) or self._hands_over, f"{what} does not end"
        await self.scheduler.still()
        self._collect()

    @property
    def _hands_over(self) -> bool:
        return self.session is not None and self.session.log_reader._breaker.handing_over  # pyright: ignore[reportPrivateUsage]

    @property
    def begun(self) -> bool:
        """Return True if it has begun any work."""
        return self.session is not None or self.sessions_ended > 0 or bool(self._lanes) or bool(self.leases.held)

    @property
    def serves_rows(self) -> bool:
        """Return True while rows are being delivered here."""
        return self.session is not None and self.session.parked.under_way > 0

    @property
    def believes(self) -> dict[int, int]:
        """shard → epoch of the shards that this worker takes for its own and would deliver for."""
        return {shard: lease.epoch for shard, lease in self.leases.held.items() if lease.until > 0.0}
