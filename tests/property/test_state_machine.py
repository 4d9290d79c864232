"""Ownership, positions and delivery rows as a state machine: the product's parts, a real PostgreSQL, no clock.

Three workers do what relays do, in any order, a statement at a time where the draw says so; leases end, processes die
between a statement and its COMMIT, writers commit late or never. Whatever was drawn:

- nothing that was committed is lost, and nothing that was not is delivered;
- the first deliveries of a key come in the order of its commits;
- without a crash or a lost lease nothing is delivered twice;
- a write behind its fence changes nothing, and no position goes back for one;
- nothing that was discarded is delivered, wherever the positions are set back to;
- a shard has one owner, who alone believes to be it, and its epoch only rises;
- in the end everything comes to rest by itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from psycopg import AsyncConnection

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.sink_spec import SinkSpec
from tests.property.expected import Expected, Written
from tests.property.scheduler import Bench, Scheduler, SteppedStore, connected
from tests.property.worker import Worker, in_steps
from tests.support.database import Database

log = logging.getLogger(__name__)
SEQUENCES = int(os.environ.get("OUTBOX_TEST_SEQUENCES") or 15)
"""Number of sequences that are drawn among the quick tests."""
MANY_SEQUENCES = 500
"""And among the thorough ones."""
STEPS = 30
WORKERS = 3
WRITERS = 2
FIXED_SEED = 20
"""The seed of a run of CI, so that all of them are the same; elsewhere every run has another one."""
AT_REST_ROUNDS = 40
PHASES = [Phase.generate] if os.environ.get("OUTBOX_TEST_SHRINK") == "no" else list(Phase)
"""Phases of Hypothesis. Without `Phase.shrink` a sequence that fails is shown as it was drawn."""
SETTINGS = settings(
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
AT_ONCE = RetryPolicy(attempts=3, base_seconds=0.0, max_seconds=0.0, jitter=0.0)
CIRCUIT = CircuitPolicy(open_after=20, probe_seconds=1e-6, probe_max_seconds=1e-6)

EMIT = """
select outbox.emit('test', %s::jsonb, key => %s, uid => %s)"""
DUE = "update outbox.delivery set due_at = now() where sink = %s and due_at > now() returning 1"
RETRY = """
update outbox.delivery set state = 'waiting', due_at = now(), attempts = 0, claims = 0, last_error = null
 where sink = %s and state = 'dead' and (key = %s) is not false returning uid"""
DISCARD = """
with gone as (
    delete from outbox.delivery d using outbox.event e, outbox.standing p
     where d.sink = %s and d.state = 'dead' and (d.key = %s) is not false
       and e.id = d.id and p.sink = d.sink and p.shard = d.shard
       and (pg_visible_in_snapshot(e.xid, p.a_snapshot)
            or pg_visible_in_snapshot(e.xid, p.b_snapshot) and e.id <= p.last_id)
    returning d.sink, d.id, d.uid)
insert into outbox.discarded (sink, id, uid, reason) select g.*, 'test' from gone g returning uid"""
"""Only dead events that the position of their shard has passed, as everything that discards events."""
FENCE = """
update outbox.shard set owner = null, epoch = epoch + 1, lease_until = clock_timestamp() - interval '1 day'
 where sink = %s returning 1"""
GO_BACK = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last_id)
select sink, array_agg(shard order by shard), array_agg(epoch order by shard), %s, '3:3:', 3, %s, %s, %s, 0
  from outbox.shard where sink = %s group by sink returning 1"""
"""To a position with nothing before it but what is older than the sequence, and a window up to a tick."""
ROWS = "select convert_from(payload, 'UTF8')::json ->> 'n', state from outbox.delivery where sink = %s"
ALL_SILENT = "update outbox.relay set seen_at = clock_timestamp() - interval '1 day' returning 1"
ORPHANED = """
update outbox.delivery set lease_until = clock_timestamp() - interval '1 second'
 where sink = %s and owner <> all (%s) returning 1"""
TAKEN_OVER = "update outbox.shard set lease_until = clock_timestamp() - interval '1 day' where sink = %s returning 1"

WORKER = st.integers(0, WORKERS - 1)
WRITER = st.integers(0, WRITERS - 1)
KEY = st.sampled_from(["a", "b", "c", None])
WISH = st.sampled_from(["taken", "taken", "taken", "failed", "later", "down"])
WISHES = st.lists(st.tuples(WISH, st.integers(0, 3)), min_size=1, max_size=6)
TURNS = st.sampled_from([None, None, None, 0, 1, 2, 3])
"""Maximum number of statements before a lane is stopped; None means no limit."""


@dataclass
class Writer:
    """A connection of the application. ``open``: what its transaction has emitted."""

    connection: AsyncConnection[Any]
    open: list[Written] = field(default_factory=list[Written])


@dataclass
class Ground:
    """The parts that all sequences share: the event loop, the bench, the writers. Each has a sink of its own."""

    runner: asyncio.Runner
    bench: Bench
    writers: list[Writer]
    sequences: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """Writes behind their fence, by statement."""


class Outbox(RuleBasedStateMachine):
    """See the module."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.bench = ground.bench
        self.workers: list[Worker] = []
        self.started = 0
        self.written = 0
        self.faults = 0
        self.epochs: dict[int, int] = {}
        self.first_id = 0

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Run ``what``, and judge what it has done."""
        self.ground.runner.run(what)
        assert not self.bench.broken, self.bench.broken
        assert not self.expected.broken, self.expected.broken
        for worker in self.workers:
            for error in worker.errors:
                raise error

    @initialize(keeps_order=st.booleans(), hold=st.booleans(), parks=st.booleans())
    def prepare(self, keeps_order: bool, hold: bool, parks: bool) -> None:
        """Prepare a sink of batches or of requests; one that ``parks`` waits for no request."""
        self.ground.sequences += 1
        name = f"sink{self.ground.sequences}"
        park_after = 0.0 if parks else 3600.0
        self.spec = SinkSpec(
            name, ("*",), None, hold=hold, park_after_seconds=park_after, retry=AT_ONCE, circuit=CIRCUIT, start="now"
        )
        self.keeps_order = keeps_order
        self.expected = Expected(hold)
        self.run(self._prepare())

    async def _prepare(self) -> None:
        self.store = store = SteppedStore(self.bench, self.spec.name, Scheduler(free=True))
        await self.bench.ask("delete from outbox.relay returning 1")
        await self.bench.ask("delete from outbox.uid returning 1")
        tick = (await store.tick()).tick
        self.first_id = tick.seq
        self.generation = (await store.register_sinks([(self.spec.name, ("*",), "now")], tick))[self.spec.name]
        self.workers = [self._new_worker() for _ in range(WORKERS)]

    def _new_worker(self) -> Worker:
        self.started += 1
        return Worker(self.bench, self.started, self.spec, self.generation, self.expected, keeps_order=self.keeps_order)

    # -- writers ------------------------------------------------------------------------------------------------

    @rule(writer=WRITER, key=KEY, kind=st.sampled_from(["plain", "plain", "plain", "poison"]))
    def emit(self, writer: int, key: str | None, kind: str) -> None:
        """Emit in a transaction that stays open. A writer waits for another that has the key, which commits first."""
        self.run(self._emit(self.ground.writers[writer], key, kind))

    @rule(key=KEY, kind=st.sampled_from(["plain", "plain", "plain", "poison"]))
    def emit_and_commit(self, key: str | None, kind: str) -> None:
        """Emit one event in a transaction of its own."""
        self.run(self._emit_and_commit(key, kind))

    async def _emit_and_commit(self, key: str | None, kind: str) -> None:
        writer = self.ground.writers[-1]
        await self._emit(writer, key, kind)
        await self._end(writer, committed=True)

    async def _emit(self, writer: Writer, key: str | None, kind: str) -> None:
        for other in self.ground.writers:
            if other is not writer and key is not None and any(written.key == key for written in other.open):
                await self._end(other, committed=True)
        self.written += 1
        written = Written(self.written, key, kind == "poison")
        parameters = (json.dumps({"n": written.n}), key, UUID(int=written.n))
        await writer.connection.execute(EMIT, parameters)
        writer.open.append(written)

    @rule(writer=WRITER, committed=st.booleans())
    def end(self, writer: int, committed: bool) -> None:
        """Commit or roll back a writer's transaction."""
        self.run(self._end(self.ground.writers[writer], committed=committed))

    async def _end(self, writer: Writer, *, committed: bool) -> None:
        events, writer.open = writer.open, []
        if committed:
            self.expected.committed.update((written.n, written) for written in events)
            await writer.connection.commit()
        else:
            await writer.connection.rollback()

    # -- workers --------------------------------------------------------------------------------------------------

    @rule(
        worker=WORKER,
        what=st.sampled_from(["own", "read", "settle", "forward", "claim", "sweep", "settle rows", "unblock"]),
        turns=TURNS,
    )
    def work(self, worker: int, what: str, turns: int | None) -> None:
        """Let a loop of a relay do one step, or a part of it; what stood still continues."""
        self.run(self._work(worker, what, turns))

    async def _work(self, number: int, what: str, turns: int | None = None) -> None:
        await self.workers[number].do(what, turns)
        if self._has_left(number):
            await self._leave(number)

    def _has_left(self, number: int) -> bool:
        worker = self.workers[number]
        return worker.stopped and not worker.leases.held and not worker.serves_rows

    async def _leave(self, number: int) -> None:
        await self.workers[number].do("leave")
        await self.workers[number].crash()
        self._replace(number)

    def _replace(self, number: int) -> None:
        self.faults += self.workers[number].sessions_ended - 1
        self.workers[number] = self._new_worker()

    @rule(worker=WORKER)
    def begin(self, worker: int) -> None:
        """Let a worker claim its share, and read."""
        self.run(self._begin(worker))

    async def _begin(self, worker: int) -> None:
        await self._work(worker, "own")
        await self._work(worker, "read")

    @rule(worker=WORKER, wishes=WISHES)
    def answer(self, worker: int, wishes: list[tuple[str, int]]) -> None:
        """Let the destination answer."""
        self.run(self._answer(worker, wishes))

    async def _answer(self, worker: int, wishes: list[tuple[str, int]]) -> None:
        for wish, place in wishes:
            await self.workers[worker].answer(wish, place)

    @rule(worker=WORKER, wishes=WISHES, turns=TURNS)
    def deliver(self, worker: int, wishes: list[tuple[str, int]], turns: int | None) -> None:
        """Let a worker read, the destination answer, and the answer be settled or be about to be."""
        self.run(self._deliver(worker, wishes, turns))

    async def _deliver(self, worker: int, wishes: list[tuple[str, int]], turns: int | None) -> None:
        await self._begin(worker)
        await self._answer(worker, wishes)
        await self._work(worker, "settle", turns)

    # -- faults -----------------------------------------------------------------------------------------------------

    @rule(worker=WORKER, hours=st.sampled_from([1, 24]))
    def lose_leases(self, worker: int, hours: int) -> None:
        """End a worker's leases: just now, or so long ago that others claim beyond their share."""
        self.faults += 1
        self.run(self.workers[worker].lose_leases(hours))

    @rule(worker=WORKER, successor=WORKER)
    def take_over(self, worker: int, successor: int) -> None:
        """End a worker's leases, and let another claim."""
        self.faults += 1
        self.run(self._take_over(worker, successor))

    async def _take_over(self, worker: int, successor: int) -> None:
        await self.workers[worker].lose_leases(24)
        await self._work(successor, "own")

    @rule(worker=WORKER)
    def lose_row_leases(self, worker: int) -> None:
        """End the leases of the rows that a worker has claimed, so that others may claim them."""
        self.faults += 1
        self.run(self.workers[worker].lose_row_leases())

    @rule(worker=WORKER, successor=WORKER, key=KEY, wishes=WISHES)
    def overtake_rows(self, worker: int, successor: int, key: str | None, wishes: list[tuple[str, int]]) -> None:
        """End the leases of a worker's rows between their answers and the write, and let another claim the rows.

        Drawn step by step, a worker hardly ever writes what another has claimed.
        """
        self.faults += 1
        self.run(self._overtake_rows(worker, successor, key, wishes))

    async def _overtake_rows(self, worker: int, successor: int, key: str | None, wishes: list[tuple[str, int]]) -> None:
        await self._emit_and_commit(key, "plain")
        await self._deliver(worker, [("failed", 0)], None)
        await self._work(worker, "sweep")
        await self._answer(worker, wishes)
        await self.workers[worker].lose_row_leases()
        await self._work(successor, "sweep")
        await self._work(worker, "settle rows")

    @rule(worker=WORKER, successor=WORKER, key=KEY, wishes=WISHES, sent=st.sampled_from([0, 1]))
    def overtake_settlement(
        self, worker: int, successor: int, key: str | None, wishes: list[tuple[str, int]], sent: int
    ) -> None:
        """End a worker's leases before its settlement is sent, or before its COMMIT; another claims and settles."""
        self.faults += 1
        self.run(self._overtake_settlement(worker, successor, key, wishes, sent))

    async def _overtake_settlement(
        self, worker: int, successor: int, key: str | None, wishes: list[tuple[str, int]], sent: int
    ) -> None:
        await self._emit_and_commit(key, "plain")
        await self._begin(worker)
        await self._answer(worker, wishes)
        await self._work(worker, "settle", 0)
        await self.workers[worker].lose_leases(24)
        await self._work(worker, "settle", sent)
        await self._deliver(successor, [("taken", 0)], None)
        await self._work(worker, "settle")

    @rule(worker=WORKER, commits_are_lost=st.booleans())
    def crash(self, worker: int, commits_are_lost: bool) -> None:
        """End a process, and start another."""
        self.faults += 1
        self.run(self.workers[worker].crash(commits_are_lost=commits_are_lost))
        self._replace(worker)

    @rule(worker=WORKER)
    def stop(self, worker: int) -> None:
        """Stop a worker: it drains, releases and leaves step by step."""
        self.run(self._work(worker, "stop"))

    @rule(worker=WORKER, successor=WORKER)
    def go_back(self, worker: int, successor: int) -> None:
        """Set the positions back, as after a restore: behind everything that an owner still does. One relay ends."""
        self.faults += 1
        self.run(self._go_back(worker, successor))

    async def _go_back(self, worker: int, successor: int) -> None:
        for each in self.workers:
            await each.lose_leases(24)
        await self.workers[worker].crash()
        self._replace(worker)
        tick = (await self.store.tick()).tick
        await self.bench.ask(FENCE, self.spec.name)
        self.bench.owners_changed()
        await self.bench.ask(GO_BACK, self.first_id, *tick, self.spec.name)
        await self._work(successor, "own")

    # -- operators --------------------------------------------------------------------------------------------------

    @rule(key=KEY)
    def retry(self, key: str | None) -> None:
        """Retry the dead events of a key, or all of them. Any worker may own their shards."""
        self.run(self._act(RETRY, key, self.expected.retried))

    @rule(key=KEY)
    def discard(self, key: str | None) -> None:
        """Dead events of a key, or all of them, are discarded, if the positions have passed them."""
        self.run(self._act(DISCARD, key, self.expected.discarded))

    async def _act(self, action: str, key: str | None, done: set[int]) -> None:
        done.update(uid.int for (uid,) in await self.bench.ask(action, self.spec.name, key))

    @rule(worker=WORKER, successor=WORKER, key=KEY, action=st.sampled_from([None, RETRY, DISCARD]))
    def succeed_to_dead(self, worker: int, successor: int, key: str | None, action: str | None) -> None:
        """Let an event die, another relay take over, dead events be acted on, and a later event of its key be read.

        Drawn step by step, these hardly ever follow one another.
        """
        self.faults += 1
        self.run(self._succeed_to_dead(worker, successor, key, action))

    async def _succeed_to_dead(self, worker: int, successor: int, key: str | None, action: str | None) -> None:
        await self._begin(worker)
        await self._emit_and_commit(key, "poison")
        await self._deliver(worker, [("taken", 0)], None)
        await self._take_over(worker, successor)
        await self._emit_and_commit(key, "plain")
        await self._work(successor, "read", 2)
        if action:
            await self._act(action, None, self.expected.retried if action == RETRY else self.expected.discarded)
        await self._work(successor, "read")
        await self._emit_and_commit(key, "plain")
        await self._deliver(successor, [("taken", 0), ("taken", 0)], None)

    @rule(worker=WORKER, key=KEY, wishes=WISHES)
    def retry_before_waiting(self, worker: int, key: str | None, wishes: list[tuple[str, int]]) -> None:
        """Let an event die, fail one behind it, hold a third behind that, and retry and claim the first.

        Drawn step by step, there is hardly ever a row before one that waits.
        """
        self.run(self._retry_before_waiting(worker, key, wishes))

    async def _retry_before_waiting(self, worker: int, key: str | None, wishes: list[tuple[str, int]]) -> None:
        await self._begin(worker)
        for kind, wish in (("poison", "taken"), ("plain", "failed"), ("plain", "taken")):
            await self._emit_and_commit(key, kind)
            await self._deliver(worker, [(wish, 0)], None)
            await self._work(worker, "settle rows")
        await self._act(RETRY, key, self.expected.retried)
        await self._work(worker, "sweep")
        await self._answer(worker, wishes)
        await self._work(worker, "settle rows")

    @rule()
    def wait(self) -> None:
        """Make everything due that waits for its time."""
        self.run(self.bench.ask(DUE, self.spec.name))

    # -- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def owners(self) -> None:
        """Check that a shard has one owner, that it alone believes to be it, and that the epoch only rises."""
        if not self.bench.owners_are_known():
            self.ground.runner.run(self._owners())

    async def _owners(self) -> None:
        owners = await self.bench.owners(self.spec.name)
        believed: set[int] = set()
        for worker in self.workers:
            for shard, epoch in worker.believes.items():
                assert shard not in believed, f"two workers believe that shard {shard} is theirs"
                assert owners[shard] == (worker.id, epoch), f"shard {shard} is not whose it believes to be"
                believed.add(shard)
        for shard, (_, epoch) in owners.items():
            assert epoch >= self.epochs.get(shard, 0), f"the epoch of shard {shard} went back"
            self.epochs[shard] = epoch

    @invariant()
    def no_duplicate_without_a_fault(self) -> None:
        """Assert that events that were delivered twice were in flight at a fault."""
        faults = self.faults + sum(worker.sessions_ended for worker in self.workers)
        assert faults or not self.expected.twice, f"events {self.expected.twice} were delivered twice"

    # -- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everything comes to rest by itself, and what was committed is delivered or dead."""
        if not self.workers:
            return
        try:
            if not (self.bench.broken or self.expected.broken or any(worker.errors for worker in self.workers)):
                self.run(self._come_to_rest())
        finally:
            self.ground.refused += self.bench.refused
            self.ground.runner.run(self._clean())

    async def _clean(self) -> None:
        for writer in self.ground.writers:
            await self._end(writer, committed=False)
        for worker in self.workers:
            await worker.crash()
        self.bench.broken.clear()
        self.bench.refused.clear()

    async def _come_to_rest(self) -> None:
        for writer in self.ground.writers:
            await self._end(writer, committed=True)
        for worker in self.workers:
            await worker.run_freely()
        await self.bench.end_held()
        await self.bench.ask(TAKEN_OVER, self.spec.name)
        await self.bench.ask(ALL_SILENT)
        await self.bench.ask(ORPHANED, self.spec.name, [worker.id for worker in self.workers])
        missing = ["everything"]
        rounds = 0
        while missing and rounds < AT_REST_ROUNDS:
            rounds += 1
            await self._round(share=rounds < 3 or rounds % 4 == 0)
            missing = self.expected.missing(await self.bench.ask(ROWS, self.spec.name))
        assert not missing, missing
        disorder = self.expected.disorder(await self.bench.ask(ROWS, self.spec.name))
        assert not disorder, disorder

    async def _round(self, *, share: bool) -> None:
        """Return the possible steps of every loop of every worker that has begun."""
        await self.bench.ask(DUE, self.spec.name)
        for number in range(WORKERS):
            if number and not self.workers[number].begun:
                continue
            for what in (*(["own"] if share else []), "read", "settle", "sweep", "settle rows", "unblock"):
                await self.workers[number].finish(what)
            if self._has_left(number):
                await self._leave(number)
                await self.workers[number].run_freely()


def seed() -> int:
    """Return OUTBOX_TEST_SEED; without it always the same number in CI, and a new one elsewhere."""
    given = os.environ.get("OUTBOX_TEST_SEED")
    return int(given) if given else FIXED_SEED if os.environ.get("CI") == "true" else random.randrange(2**31)


async def prepared(dsn: str) -> tuple[Bench, list[Writer]]:
    """Prepare every connection that the sequences use."""
    bench = Bench(dsn, await connected(dsn), await connected(dsn))
    return bench, [Writer(await connected(dsn, autocommit=False)) for _ in range(WRITERS + 1)]


async def closed(ground: Ground) -> None:
    """Close what ``prepared`` has opened."""
    await ground.bench.close()
    for writer in ground.writers:
        await writer.connection.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sequences", [SEQUENCES, pytest.param(MANY_SEQUENCES, marks=pytest.mark.thorough)], ids=["some", "many"]
)
def test_ownership_positions_and_rows(database: Database, sequences: int) -> None:
    drawn_from = seed() + sequences
    log.warning("OUTBOX_TEST_SEED=%s", drawn_from - sequences)
    unretrieved: list[Any] = []
    with asyncio.Runner() as runner, in_steps():
        runner.get_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        ground = Ground(runner, *runner.run(prepared(database.dsn)))
        try:
            machine: Any = hypothesis.seed(drawn_from)(partial(Outbox, ground))
            run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=sequences, phases=PHASES))
        finally:
            runner.run(closed(ground))
    log.warning("%s sequences, writes behind their fence: %s", ground.sequences, dict(ground.refused))
    gc.collect()
    assert not unretrieved, f"tasks ended unnoticed: {unretrieved[:3]}"
    assert ground.sequences >= sequences
    assert ground.refused.total() > 0
