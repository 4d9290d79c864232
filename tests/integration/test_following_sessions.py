"""Queues that get new settings or a new name while rows are under way: another session follows beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict
from outbox_relay.relay.sink_relay import SinkRelay
from tests.support.database import Database, end_connections, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import LOST, running, spec
from tests.support.wait import becomes

LEASE = 3.0
QUEUE = replace(spec("s"), claim="rows", ordered=False)
ALL_SETTLED = "select 1 where not exists (select from outbox.delivery)"


class Jobs:
    """Handlers: those of a key that begins with "long" wait until the test ends them, and the others take a moment."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.began: list[str | None] = []
        self.most = 0
        self._running = 0

    async def __call__(self, event: StoredEvent, _attempt: int) -> Verdict:
        self.began.append(event.key)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            if event.key is not None and event.key.startswith("long"):
                await self.end.wait()
            else:
                await asyncio.sleep(0.01)
        finally:
            self._running -= 1
        return DELIVERED


class ClosingSink(MemorySink):
    """A sink of single calls that knows whether it was reset and closed."""

    def __init__(self, jobs: Jobs, max_in_flight: int | None = None) -> None:
        super().__init__(jobs, keeps_order=False, max_in_flight=max_in_flight)
        self.closed = self.was_reset = False

    async def reset(self) -> None:
        """Reset, and say so."""
        await super().reset()
        self.was_reset = True

    async def close(self) -> None:
        """Close, and say so."""
        await super().close()
        self.closed = True


async def begin_long(database: Database, jobs: Jobs) -> int:
    """Emit an event whose job lasts until the test ends it, and return its id once the job is under way."""
    [event] = emit(database, ["long"])
    await becomes(lambda: jobs.began == ["long"], "the job is under way")
    return event


def reload(relay: SinkRelay, sink: MemorySink | None = None, *, record: str = "all") -> None:
    """Give the relay new settings, as a reload does, and ``sink`` if it was made again."""
    relay.reload(replace(QUEUE, record_attempts=record), relay.leases.generation, sink)


def restarts(relay: SinkRelay) -> int:
    """Return the number of sessions that began for new settings or a new name."""
    return relay.restarts["reload"]


async def refuse() -> int:
    """Fail as a statement does whose time is over."""
    raise StatementFailed("canceling statement due to statement timeout", "57014")


@pytest.mark.parametrize("remade", [True, False], ids=["sink made again", "same sink"])
async def test_new_settings_serve_new_events_beside_a_long_job(database: Database, remade: bool) -> None:
    """Goes red when the queue waits for the job, when the job is cut, and when its sink is closed or reset."""
    jobs = Jobs()
    first, second = ClosingSink(jobs), ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        long = await begin_long(database, jobs)
        reload(relay, second if remade else None)
        short = emit(database, ["a", "b", "c"])
        await delivered(second if remade else first, short)
        assert not first.closed
        jobs.end.set()
        await delivered(first, [long])
        await has(database, ALL_SETTLED)
        if remade:
            await becomes(lambda: first.closed, "the earlier sink is closed")
        assert not second.closed
        assert sorted(first.attempts + second.attempts) == sorted([long, *short]), "each once"
        assert relay.spec.record_attempts == "all"
        assert (restarts(relay), relay.measures.row_leases_lost) == (1, 0)
        assert relay.sinks == [second if remade else first]


async def test_the_sessions_of_a_queue_share_its_slots(database: Database) -> None:
    """Goes red when the session that follows counts its own requests only: three would run at once."""
    jobs = Jobs()
    sink, second = ClosingSink(jobs, max_in_flight=2), ClosingSink(jobs, max_in_flight=2)
    async with running(database.dsn, (QUEUE, sink), lease_seconds=LEASE) as harness:
        await begin_long(database, jobs)
        reload(harness.relays[0], second)
        await delivered(second, emit(database, ["short"] * 20))
        assert jobs.most == 2
        jobs.end.set()
        await has(database, ALL_SETTLED)
        await becomes(lambda: sink.closed, "the former session has ended")
        jobs.most = 0
        await delivered(second, emit(database, ["short"] * 20))
        assert jobs.most == 2, "its slot is free again"


async def test_the_log_says_that_events_wait_for_slots_of_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.relay.sink_relay.TELL_SECONDS", 0.1)
    jobs = Jobs()
    first, second = ClosingSink(jobs, max_in_flight=2), ClosingSink(jobs, max_in_flight=2)
    with capture_logs() as lines:
        async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
            emit(database, ["long"] * 2)
            await becomes(lambda: len(jobs.began) == 2, "the jobs are under way")
            reload(harness.relays[0], second)
            short = emit(database, ["a"])
            await becomes(lambda: [line for line in lines if line["event"] == "config.waits"], "the log says it")
            jobs.end.set()
            await delivered(second, short)
    assert [line["requests"] for line in lines if line["event"] == "config.waits"] == [2]


async def test_fewer_slots_count_the_requests_of_before(database: Database) -> None:
    jobs = Jobs()
    first, second = ClosingSink(jobs, max_in_flight=3), ClosingSink(jobs, max_in_flight=1)
    async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
        emit(database, ["long"] * 3)
        await becomes(lambda: len(jobs.began) == 3, "the jobs are under way")
        reload(harness.relays[0], second)
        await becomes(lambda: restarts(harness.relays[0]), "another session follows")
        short = emit(database, ["short"] * 5)
        await has(database, "select 1 from outbox.delivery having count(*) = 8")
        assert len(jobs.began) == 3
        jobs.most = 0
        jobs.end.set()
        await delivered(second, short)
        assert jobs.most == 1


async def test_a_second_reload_cuts_no_job_of_the_first_session(database: Database) -> None:
    """The second session has nothing under way. Goes red when it ends by an error, which ends them all."""
    jobs = Jobs()
    sinks = [ClosingSink(jobs) for _ in range(3)]
    async with running(database.dsn, (QUEUE, sinks[0]), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        long = await begin_long(database, jobs)
        reload(relay, sinks[1])
        await delivered(sinks[1], emit(database, ["a"]))
        await has(database, "select 1 from outbox.delivery having count(*) = 1")
        reload(relay, sinks[2], record="failures")
        await delivered(sinks[2], emit(database, ["b"]))
        await becomes(lambda: sinks[1].closed, "the second session has ended")
        jobs.end.set()
        await delivered(sinks[0], [long])
        await becomes(lambda: sinks[0].closed, "the first session has ended")
        assert jobs.began == ["long", "a", "b"]
        assert restarts(relay) == 2


async def test_no_more_sessions_run_than_allowed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next settings then wait for a job, and the log says so."""
    monkeypatch.setattr("outbox_relay.relay.running_sessions.MOST_SESSIONS", 2)
    monkeypatch.setattr("outbox_relay.relay.sink_relay.TELL_SECONDS", 0.1)
    jobs = Jobs()
    sinks = [ClosingSink(jobs) for _ in range(3)]
    with capture_logs() as lines:
        async with running(database.dsn, (QUEUE, sinks[0]), lease_seconds=LEASE, expects={"reload"}) as harness:
            [relay] = harness.relays
            for number, sink in enumerate(sinks[1:]):
                emit(database, [f"long {number}"])
                await becomes(lambda: len(jobs.began) == number + 1, "the job is under way")  # noqa: B023
                reload(relay, sink, record=f"{number}")
            await becomes(lambda: [line for line in lines if line["event"] == "config.waits"], "the log says it")
            assert relay.spec.record_attempts == "0"
            jobs.end.set()
            await delivered(sinks[2], emit(database, ["short"]))
            assert jobs.began == ["long 0", "long 1", "short"]
    followed = [(line["reason"], line["requests"]) for line in lines if line["event"] == "sink.followed"]
    assert followed[0] == ("the configuration was reloaded", 1)


async def test_an_error_ends_every_session_and_nothing_of_them_counts(database: Database) -> None:
    """Goes red when a session goes on after another has failed: its job would be done twice at once."""
    jobs = Jobs()
    first, second = ClosingSink(jobs), ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE, expects=LOST) as harness:
        [relay] = harness.relays
        long = await begin_long(database, jobs)
        reload(relay, second)
        await delivered(second, emit(database, ["a"]))
        await asyncio.to_thread(end_connections, database)
        await becomes(lambda: jobs.began == ["long", "a", "long"], "it begins again at once")
        assert first.closed
        jobs.end.set()
        await delivered(second, [long])
        await has(database, ALL_SETTLED)
        assert ids(first) == []


async def test_a_statement_that_fails_as_a_session_follows_cuts_no_job(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when it ends all sessions: the job would be cut, though nothing is wrong with its row.

    The failure is made up: every table that a new session reads is read by the rest of the relay, too.
    """
    jobs = Jobs()
    first, second = ClosingSink(jobs), ClosingSink(jobs)
    with capture_logs() as lines:
        async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
            long = await begin_long(database, jobs)
            with monkeypatch.context() as patched:
                patched.setattr(harness.store, "floor", refuse)
                reload(harness.relays[0], second)
                await becomes(lambda: [1 for line in lines if line["event"] == "sink.prepare_failed"], "it fails")
            await delivered(second, emit(database, ["a"]))
            jobs.end.set()
            await delivered(first, [long])
            assert jobs.began == ["long", "a"]


async def test_a_lost_shard_cuts_no_job(database: Database) -> None:
    """Goes red when the session of a queue ends with its rows: leases of rows and of shards are apart."""
    jobs = Jobs()
    sink = ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, sink), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        long = await begin_long(database, jobs)
        await harness.owns_all()
        query(database, "update outbox.shard set epoch = epoch + 1 where shard = 7")
        await becomes(lambda: relay.restarts["lease_lost"], "the loss is known")
        await delivered(sink, emit(database, ["a"]))
        jobs.end.set()
        await delivered(sink, [long])
        await has(database, ALL_SETTLED)
        assert jobs.began == ["long", "a"]


async def test_a_loss_at_the_bound_of_sessions_waits(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when it ends all of them, with their jobs."""
    monkeypatch.setattr("outbox_relay.relay.running_sessions.MOST_SESSIONS", 2)
    jobs = Jobs()
    sink = ClosingSink(jobs)
    with capture_logs() as lines:
        async with running(database.dsn, (QUEUE, sink), lease_seconds=LEASE, expects={"lease_lost"}) as harness:
            [relay] = harness.relays
            for number in range(2):
                emit(database, [f"long {number}"])
                await becomes(lambda: len(jobs.began) == number + 1, "the job is under way")  # noqa: B023
                await harness.owns_all()
                query(database, "update outbox.shard set epoch = epoch + 1 where shard = 7")
                await becomes(
                    lambda: relay.restarts["lease_lost"] or [1 for line in lines if line["event"] == "config.waits"],
                    "the loss is known",
                )
            await becomes(lambda: [1 for line in lines if line["event"] == "config.waits"], "the log says it")
            jobs.end.set()
            await delivered(sink, emit(database, ["a"]))
            await has(database, ALL_SETTLED)
    assert jobs.began == ["long 0", "long 1", "a"]


async def test_a_loss_as_the_relay_stops_frees_the_other_shards(database: Database) -> None:
    """Goes red when they are renewed until the job has ended: no other relay would serve the queue."""
    jobs = Jobs()
    sink = ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, sink), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        long = await begin_long(database, jobs)
        await harness.owns_all()
        query(database, "update outbox.shard set epoch = epoch + 1 where shard = 7")
        relay.leases.lose(7, relay.leases.held[7].epoch)  # as the next renewal finds
        stopping = asyncio.create_task(harness.stop(60))
        await has(database, "select 1 from outbox.shard where lease_until > now() having count(*) <= 1")
        assert not stopping.done()
        jobs.end.set()
        await stopping
        assert ids(sink) == [long]


async def test_a_relay_that_stops_waits_for_the_jobs_of_every_session(database: Database) -> None:
    jobs = Jobs()
    first, second = ClosingSink(jobs), ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
        long = await begin_long(database, jobs)
        reload(harness.relays[0], second)
        await delivered(second, emit(database, ["a"]))
        stopping = asyncio.create_task(harness.stop())
        await has(database, "select 1 from outbox.shard having count(owner) = 0")
        assert not stopping.done()
        jobs.end.set()
        await stopping
        assert ids(first) == [long]
        await has(database, ALL_SETTLED)


async def test_a_relay_that_must_stop_gives_the_rows_of_every_session_back(database: Database) -> None:
    jobs = Jobs()
    first, second = ClosingSink(jobs), ClosingSink(jobs)
    async with running(database.dsn, (QUEUE, first), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        await begin_long(database, jobs)
        reload(relay, second)
        emit(database, ["long"])
        await becomes(lambda: jobs.began == ["long"] * 2, "a job of the second session is under way")
        harness.tasks[2].cancel()
        await asyncio.wait([harness.tasks[2]])
        await relay.leave()
        assert first.was_reset
        assert second.was_reset
        assert query(database, "select lease, claims from outbox.delivery") == [(None, 0)] * 2
        jobs.end.set()


async def test_a_queue_that_is_taken_back_cuts_no_job(database: Database) -> None:
    """Other relays have served it with other routes and are gone. Goes red when the session ends by an error."""
    jobs = Jobs()
    sink = ClosingSink(jobs)
    async with ledger(database) as others, running(database.dsn, (QUEUE, sink), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        await begin_long(database, jobs)
        routes: Sequence[tuple[str, list[str], str]] = [("s", ["other.*"], "beginning")]
        await others.store.register_sinks(routes, await others.tick(), queued=["s"])
        await becomes(lambda: relay.leases.superseded, "other relays serve it")
        await becomes(lambda: len(relay.leases.held) == SHARDS, "it is taken back")
        await delivered(sink, emit(database, ["a"]))
        jobs.end.set()
        await has(database, ALL_SETTLED)
        assert jobs.began == ["long", "a"]


async def test_a_claim_that_waits_for_the_circuit_keeps_no_slot(database: Database) -> None:
    """Goes red when the session that is followed holds a slot until its job ends: no other event would begin."""
    jobs = Jobs()

    async def unavailable(event: StoredEvent, attempt: int) -> Verdict:
        verdict = await jobs(event, attempt)
        if event.key == "fails":
            return Failed("no", 503)
        return verdict

    first = MemorySink(unavailable, keeps_order=False, max_in_flight=2)
    second = ClosingSink(jobs, max_in_flight=2)
    queue = replace(QUEUE, circuit=replace(QUEUE.circuit, open_after=1, probe_seconds=600.0))
    async with running(database.dsn, (queue, first), lease_seconds=LEASE) as harness:
        [relay] = harness.relays
        await begin_long(database, jobs)
        emit(database, ["fails"])
        await becomes(lambda: relay.circuit == "open", "the circuit is open")
        reload(relay, second)
        await delivered(second, emit(database, ["a", "b"]))
        jobs.end.set()


async def test_a_log_is_taken_back_although_a_slow_request_is_under_way(database: Database) -> None:
    """Goes red when it waits for the request, as a queue does not have to: no relay would serve the sink meanwhile."""
    jobs = Jobs()
    sink = ClosingSink(jobs)
    log = spec("s", ordered=False, park_after_seconds=0.1)
    async with (
        ledger(database) as others,
        running(database.dsn, (log, sink), lease_seconds=LEASE, expects={"reload", "handed_over"}) as harness,
    ):
        [relay] = harness.relays
        emit(database, ["long"])
        await has(database, "select 1 from outbox.delivery")
        routes: Sequence[tuple[str, list[str], str]] = [("s", ["*", "other.*"], "beginning")]
        await others.store.register_sinks(routes, await others.tick())
        await becomes(lambda: relay.leases.superseded, "other relays serve it")
        await delivered(sink, emit(database, ["a"]))
        assert "long" not in {event.key for event in sink.delivered}, "its request has not ended"
        jobs.end.set()
