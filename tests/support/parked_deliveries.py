"""Parked deliveries without a database, whose claims and calls are those of the test."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from outbox_relay.domain.in_flight import InFlight
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, RowUpdate
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.claimed_calls import ClaimedCalls
from outbox_relay.relay.context import CallResult
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.slow_requests import SlowRequests
from outbox_relay.sinks.contract.handing import an_event
from tests.support.limits import no_limits
from tests.support.recording import a_recorder

CLOSED = Permit(0, probe=False)
"""The permit of a circuit that is closed."""


async def spin() -> None:
    """Let every task come as far as it can: none of them waits for anything outside."""
    for _ in range(10):
        await asyncio.sleep(0)


def claimed_rows(count: int, attempts: int = 2) -> list[ClaimedRow]:
    """Return rows as a claim does."""
    return [ClaimedRow(an_event(), ordered=True, attempts=attempts, claims=1, lease=uuid4()) for _ in range(count)]


class CountingTasks(asyncio.TaskGroup):
    """Tasks whose names are known."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self.names.append(coro.__name__)
        return super().create_task(coro, **options)


@asynccontextmanager
async def ending_tasks(seconds: float = 5.0) -> AsyncGenerator[CountingTasks]:
    """End tasks after at most ``seconds``."""
    async with asyncio.timeout(seconds), CountingTasks() as tasks:
        yield tasks


class Deliveries:
    """Parked deliveries of a sink with ``slots``, whose requests end when ``answer`` is set.

    A claim gets the next of ``claims``, or no row. With ``queued`` it is of a sink with ``claim = "rows"``.
    """

    def __init__(self, *, queued: bool = False, fair: bool = False, slots: int = 1) -> None:
        self.claims = list[list[ClaimedRow]]()
        self.asked = list[int]()
        """The numbers of rows that claims asked for."""
        self.answer = asyncio.Event()
        self.holds = True
        self.sent: list[int] = []
        self.deleted = list[list[int]]()
        self.wrote = asyncio.Event()
        self.removed = list[int]()
        self.rows = claimed_rows(3)
        self.leases = SinkLeases("s", 1)
        self.admissions = asyncio.Semaphore(0)
        """Admissions by the limits across relays, while the sink has one."""
        self.breaker: Any = SimpleNamespace(
            holds=self._circuit_holds, handing_over=False, admit_at_once=self._admit, admit=self._wait_for_circuit
        )
        parts: Any = SimpleNamespace(
            spec=SimpleNamespace(
                name="s", hold=False, record_attempts="failures", queued=queued, fair=fair, tenants=False
            ),
            sink=SimpleNamespace(max_batch=1, keeps_order=False),
            limiter=ConcurrencyLimiter(slots, asyncio.Event()),
            breaker=self.breaker,
            leases=self.leases,
            due_timer=DueTimer(),
            measures=SinkMeasures(),
            now=lambda: self.rows[0].event.created_at,
            delivered=self._circuit_holds,
            call=self._call,
            limits=no_limits(self.leases),
            admit=self._limit,
            blocked=InFlight().blocked,
            keyed=self._never_keyed,
            settler=SimpleNamespace(committed=self._wait_for_blocked_keys),
            parked_limit=SimpleNamespace(remove=self.removed.append),
            delete_rows=self._delete_rows,
            update_rows=self._update_rows,
        )
        self.parked: Any = ParkedDeliveries(parts, parts, uuid4(), parts, SlowRequests("s", 1), a_recorder())
        self.settler: Any = self.parked._settler
        self.limiter: ConcurrencyLimiter = parts.limiter
        self.parked._claims.claim = self._claim

    def _never_keyed(self, _event: object) -> bool:
        return False

    def limit(self) -> None:
        """Give the sink a limit across relays."""
        self.leases.limits = SinkLimits(max_in_flight_total=1)

    async def _limit(self, _source: str, most: int = 1) -> Admission:
        await self.admissions.acquire()
        return Admission(most)

    def _admit(self) -> Permit | None:
        return CLOSED if self.holds else None

    async def _wait_for_circuit(self) -> Permit:
        await asyncio.Event().wait()
        return CLOSED

    async def _claim(self, most: int) -> list[ClaimedRow]:
        self.asked.append(most)
        rows = self.claims.pop(0) if self.claims else []
        return rows[:most]

    async def _wait_for_blocked_keys(self, _settlement: int) -> None:
        await asyncio.Event().wait()

    def _circuit_holds(self, permit: Permit) -> bool:
        return self.holds and permit == CLOSED

    async def _call(self, events: Sequence[Any], _until: float, _attempt: int) -> CallResult:
        self.sent += [event.id for event in events]
        await self.answer.wait()
        return CallResult([DELIVERED] * len(events), 0.001)

    async def _delete_rows(self, _sink: str, rows: Sequence[DeliveredRow], **_: Any) -> dict[int, bool]:
        self.deleted.append([row.id for row in rows])
        self.wrote.set()
        return {row.id: False for row in rows}

    async def _update_rows(self, _sink: str, rows: Sequence[RowUpdate], **_: Any) -> set[int]:
        self.wrote.set()
        return {row.id for row in rows}

    async def start(
        self,
        tasks: asyncio.TaskGroup,
        permit: Permit = CLOSED,
        admission: Admission = UNLIMITED,
        *,
        is_full: bool = True,
    ) -> Coroutine[Any, Any, None]:
        """Return the start of one claim with three calls, of which the first has the slot."""
        await self.parked._pace.take_slot()
        self.settler.expect(len(self.rows))
        calls = ClaimedCalls(deque([row] for row in self.rows), lease_clock() + 5.0, permit, is_full=is_full)
        return self.parked._start(tasks, calls, admission)

    @property
    def given_back(self) -> list[tuple[int, int]]:
        """The ids of the rows that go back as they were, with their attempts."""
        return [(back.id, back.attempts) for _, back, _ in self.settler._back if back.state is back.due_in is None]

    @property
    def ids(self) -> list[int]:
        """The ids of the rows of the first claim."""
        return [row.event.id for row in self.rows]


class Ahead(Deliveries):
    """Deliveries of a queue, of which two more rows are claimed ahead while the first rows are delivered.

    Each of ``answers`` ends one request.
    """

    def __init__(self) -> None:
        super().__init__(queued=True)
        self.ahead = claimed_rows(2, attempts=3)
        self.claims = [self.ahead]
        self.answers = asyncio.Semaphore(0)
        for _ in range(200):
            self.parked._pace.observe(0.008)  # a claim takes three rows

    async def _call(self, events: Sequence[Any], _until: float, _attempt: int) -> CallResult:
        self.sent += [event.id for event in events]
        await self.answers.acquire()
        return CallResult([DELIVERED] * len(events), 0.008)

    async def begin(self, tasks: asyncio.TaskGroup) -> asyncio.Future[None]:
        """Begin the calls of the first claim until one of them has not begun, and the next rows are claimed."""
        started = asyncio.ensure_future(await self.start(tasks))
        await spin()
        assert len(self.claims) == 1
        self.answers.release()
        await spin()
        assert not self.claims
        return started

    async def begin_last_call(self, tasks: asyncio.TaskGroup) -> None:
        """Deliver the rows of the first claim, so that only those that were claimed ahead are in hand."""
        started = await self.begin(tasks)
        assert self.settler.awaited == len(self.rows) - 1 + len(self.ahead)
        for _ in self.rows[1:]:
            self.answers.release()
        await asyncio.wait_for(started, 5)

    @property
    def ahead_ids(self) -> list[int]:
        """The ids of the rows that were claimed ahead."""
        return [row.event.id for row in self.ahead]

    @property
    def went_back(self) -> list[int]:
        """The ids of the rows that went back as they were."""
        return [given for given, _ in self.given_back]
