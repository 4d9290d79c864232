"""A relay that cannot renew its leases stops by itself, and what it still writes changes nothing.

Its own monotonic clock stops it, whatever kept it from renewing: its event loop stood still, its process was stopped,
its database went silent. Each time another relay has taken over before it wakes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.errors import LeaseLost, SessionReset
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from outbox_relay.formats.signatures import parse_key
from outbox_relay.postgres.rows import NewRow
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.webhook import Credentials, Endpoint, WebhookSink
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, in_order
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, after, chosen, say
from tests.support.receiver.signatures import SECRET
from tests.support.relay_harness import LOST, RelayHarness, owns, running, spec
from tests.support.service import RelayService
from tests.support.wait import auntil, until

LEASE_SECONDS = 2.0
STOPPED = {"lease_lost", *LOST}
"""Why the session of a relay ends that was stopped or cut off for longer than its lease."""
BOTH = pytest.mark.parametrize("keeps_order", [True, False], ids=["batches", "requests"])


class Successor:
    """Another relay, in a thread with an event loop of its own, so that it goes on when the test's stands still."""

    def __init__(self, dsn: str) -> None:
        self.sink = MemorySink()
        self.harness = RelayHarness(dsn, [(spec("s"), self.sink)], lease_seconds=LEASE_SECONDS)
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="successor", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        await self.harness.start()
        await self._stop.wait()
        await self.harness.crash(unjudged=True)

    def start(self) -> None:
        """Join."""
        self._thread.start()

    def owns_all(self) -> bool:
        """Return True if the successor owns every shard."""
        return self.harness.lease_manager.held == {"s": SHARDS}

    def end(self) -> None:
        """Stop the thread, and judge the relay."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        self.harness.judge()


@pytest.fixture
def successor(database: Database) -> Generator[Successor]:
    found = Successor(database.dsn)
    try:
        yield found
    finally:
        found.end()


class Recorder:
    """A script of a sink that notes when each event was begun, and takes its time for each."""

    def __init__(self, seconds: float) -> None:
        self.began: list[tuple[float, int]] = []
        self.seconds = seconds

    async def __call__(self, event: StoredEvent, _attempt: int) -> Verdict:
        self.began.append((time.monotonic(), event.id))
        await asyncio.sleep(self.seconds)  # the destination takes its time
        return DELIVERED

    def since(self, moment: float) -> list[int]:
        """Return the deliveries that were begun from then on."""
        return [event_id for at, event_id in self.began if at >= moment]


def taken_over(successor: Successor) -> None:
    """Block, and with it the event loop, until the successor owns everything."""
    successor.start()
    until(successor.owns_all, seconds=60, what="the other relay has taken over")


@BOTH
async def test_a_relay_whose_event_loop_stood_still_delivers_nothing_more_under_its_old_lease(
    database: Database, successor: Successor, keeps_order: bool
) -> None:
    """Goes red when nothing is asked of the clock before events are handed over."""
    arrived: list[StoredEvent] = []
    script = Recorder(0.02)
    sink = MemorySink(script, keeps_order=keeps_order, max_in_flight=2)
    sink.max_batch = 5 if keeps_order else 1
    sink.delivered = successor.sink.delivered = arrived
    async with running(database.dsn, (spec("s"), sink), lease_seconds=LEASE_SECONDS, expects=STOPPED) as harness:
        await harness.owns_all()
        wanted = emit(database, [f"k{n % 30}" for n in range(400)])
        await delivered(sink, wanted[:5])
        assert harness.relays[0].in_hand > 100, "there is more in hand"
        began = time.monotonic()
        taken_over(successor)
        until(lambda: time.monotonic() - began > 2 * LEASE_SECONDS, seconds=60, what="twice the lease has passed")
        woke, tried = time.monotonic(), len(sink.attempts)

        async def noticed() -> bool:
            return any(isinstance(error, SessionReset) for error in harness.ended)

        await auntil(noticed, seconds=30, what="the session ends")
        assert len(sink.attempts) == tried, "nothing was handed over after the loop went on"
        assert script.since(woke) == []
        await everything(arrived, wanted)
    assert repeated(arrived) <= set(sink.attempts[:tried]), "only what was handed over by then"
    assert in_order(arrived)


async def everything(arrived: list[StoredEvent], wanted: list[int]) -> None:
    """Wait until all of `wanted` have arrived."""

    async def fact() -> bool:
        return {event.id for event in arrived} >= set(wanted)

    await auntil(fact, seconds=60, what=f"{len(wanted)} events are delivered")


def repeated(arrived: list[StoredEvent]) -> set[int]:
    """Return the events that came twice."""
    return {event_id for event_id, count in Counter(event.id for event in arrived).items() if count > 1}


@contextmanager
def between(database: Database) -> Generator[tuple[Proxy, str]]:
    """Yield a proxy to the database and the connection string through it."""
    with Proxy() as proxy:
        proxy.target = database.server.port
        yield proxy, make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port)


@pytest.mark.thorough
@BOTH
async def test_a_relay_whose_database_went_silent_stops_before_its_lease_ends_there(
    database: Database, keeps_order: bool
) -> None:
    """No answer, no FIN. Goes red when the relay does not stop by itself: it finds out only after seconds."""
    arrived: list[StoredEvent] = []
    script = Recorder(0.02)
    sink, other = MemorySink(script, keeps_order=keeps_order, max_in_flight=2), MemorySink()
    sink.max_batch = 5 if keeps_order else 1
    sink.delivered = other.delivered = arrived
    with between(database) as (proxy, dsn):
        options = {"lease_seconds": LEASE_SECONDS, "listen": False, "expects": STOPPED}
        async with running(dsn, (spec("s"), sink), **options) as harness:
            await harness.owns_all()
            wanted = emit(database, [f"k{n % 30}" for n in range(400)])
            await delivered(sink, wanted[:5])
            proxy.swallowing = True
            proxy.blackhole()
            silent = time.monotonic()
            left = "select extract(epoch from max(lease_until) - clock_timestamp())::float from outbox.shard"
            [(seconds,)] = query(database, left)
            ends = time.monotonic() + seconds
            async with running(database.dsn, (spec("s"), other), lease_seconds=LEASE_SECONDS) as successor:
                await owns(successor, SHARDS, seconds=60)
                took = time.monotonic()
                await everything(arrived, wanted)
    assert script.since(silent), "while the lease held it went on"
    assert script.since(ends) == [], "and no longer"
    assert took > ends
    assert in_order(arrived)


CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
park_after_seconds = 10
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
headers = {{ x-relay = "{name}" }}
max_in_flight = 4
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"*" = ["crm"]
"""


def relay_of(
    database: Database, receiver: Receiver, directory: Path, name: str, expects: Collection[str] = ()
) -> RelayService:
    """Return a relay that names itself in each request."""
    text = CONFIG.format(dsn=database.dsn, url=receiver.url, secret=SECRET, name=name)
    return RelayService(directory, text, name, expects=expects)


def by(receiver: Receiver, name: str) -> list[str]:
    """Return the uids that a relay has posted, in order."""
    return [request.uid for request in list(receiver.requests) if request.header("x-relay") == name]


def test_a_process_that_was_stopped_beyond_its_lease_posts_nothing_more_of_what_it_had_in_hand(
    database: Database, tmp_path: Path
) -> None:
    """SIGSTOP and SIGCONT; only what was under way may still come. Goes red without the relay's own deadline."""

    def answer(request: Request) -> Behaviour:
        return after(0.2, say(204)) if request.header("x-relay") == "one" else say(204)

    with Receiver(chosen(answer)) as receiver, relay_of(database, receiver, tmp_path, "one", STOPPED) as one:
        with database.connect() as connection:
            rows = connection.execute(
                "select outbox.emit('t', to_jsonb(n), key => 'k' || mod(n, 100))::text from generate_series(1, 300) n"
            ).fetchall()
        uids = [uid for (uid,) in rows]
        until(lambda: len(by(receiver, "one")) >= 8, seconds=60, what="it delivers")
        one.send(signal.SIGSTOP)
        with relay_of(database, receiver, tmp_path, "two") as two:
            until(lambda: set(receiver.uids) >= set(uids), seconds=90, what="the other one has delivered everything")
            until(lambda: _backlog(two) == 0, seconds=60, what="and settled it")
            before = by(receiver, "one")
            one.send(signal.SIGCONT)
            until(lambda: _said(one, "sink.restarted"), seconds=60, what="the zombie finds out")
            until(lambda: _shards(one) == 32, seconds=60, what="it has a share again")
            assert two.stop() == 0
        assert one.stop() == 0
        late = by(receiver, "one")[len(before) :]
    assert late == [], "what it had posted had arrived before it was stopped"
    assert set(before) | set(late) | set(by(receiver, "two")) == set(uids)
    arrivals = [(int(request.body), request.uid) for request in receiver.requests]
    first = list(dict.fromkeys(number for number, _ in arrivals))
    assert all([n for n in first if n % 100 == key] == sorted(n for n in first if n % 100 == key) for key in range(100))
    assert receiver.unverified == []


def _backlog(relay: RelayService) -> int:
    _, body = relay.ask("/readyz")
    return body["sinks"]["crm"]["in_hand"] if body else -1


def _shards(relay: RelayService) -> int:
    _, body = relay.ask("/readyz")
    return body["sinks"]["crm"]["shards"] if body else 0


def _said(relay: RelayService, text: str) -> bool:
    return any(text in line.get("event", "") for line in relay.lines())


async def test_a_request_that_is_ready_to_be_sent_too_late_is_not_sent() -> None:
    """The event loop may stand still between the look at the clock and the connection: here, as it judges addresses."""

    def denied(_address: str) -> None:
        time.sleep(0.3)  # the event loop stands still

    with Receiver() as receiver:
        sink = WebhookSink("crm", Endpoint(receiver.url, denied), Credentials([parse_key(SECRET)]))
        await sink.open()
        try:
            [late] = await sink.deliver([an_event()], time.monotonic() + 0.2)
            assert isinstance(late, Unavailable)
            assert receiver.requests == []
            [timely] = await sink.deliver([an_event()], time.monotonic() + 60)
            assert timely == DELIVERED
        finally:
            await sink.close()


async def zombie_and_owner(database: Database, store: Any) -> tuple[Ledger, Ledger]:
    """Return two relays: the first owned every shard of ``s``, and the second owns them now."""
    zombie, owner = Ledger(database, store), Ledger(database, store)
    await zombie.register(("s", ["*"], "beginning"))
    await zombie.own("s")
    zombie.do("update outbox.shard set lease_until = clock_timestamp() - interval '1 second'")
    assert len(await owner.own("s")) == SHARDS
    return zombie, owner


STATE = """select (select jsonb_agg(s order by s.sink, s.shard) from outbox.shard s)
                , (select jsonb_agg(p order by p.seq) from outbox.progress p)
                , (select jsonb_agg(d order by d.id) from outbox.delivery d)"""


@pytest.mark.parametrize("what", ["renew", "release", "reset crashes", "new epochs", "settle rows", "give rows back"])
async def test_what_a_zombie_writes_changes_nothing(database: Database, what: str) -> None:
    """Each goes red when its statement no longer compares the owner and the epoch."""
    async with ledger(database) as hand:
        zombie, owner = await zombie_and_owner(database, hand.store)
        [event] = owner.emit("a")
        await owner.park("s", owner.row(event, lease=uuid4(), lease_for=60.0))
        before, store = owner.query(STATE), hand.store
        held = [("s", shard, epoch) for shard, epoch in zombie.epochs["s"].items()]
        match what:
            case "renew":
                assert await store.renew_shards(zombie.relay, held, 60.0, 5.0) == {}
                now = [("s", shard, epoch) for shard, epoch in owner.epochs["s"].items()]
                assert await store.renew_shards(zombie.relay, now, 60.0, 5.0) == {}
                # Even the owner itself, at an epoch that is over.
                assert await store.renew_shards(owner.relay, held, 60.0, 5.0) == {}
            case "release":
                await store.release_shards("s", zombie.relay, zombie.epochs["s"])
                await store.release_shards("s", zombie.relay, owner.epochs["s"])
                await store.release_shards("s", owner.relay, zombie.epochs["s"])
            case "reset crashes":
                await store.reset_crashes("s", zombie.relay, zombie.epochs["s"])
                await store.reset_crashes("s", zombie.relay, owner.epochs["s"])
                await store.reset_crashes("s", owner.relay, zombie.epochs["s"])
            case "new epochs":
                assert await store.reclaim_shards("s", zombie.relay, 60.0) == []
            case "settle rows":
                [late] = owner.emit("b")
                row: NewRow = zombie.row(late)
                before = owner.query(STATE)
                with pytest.raises(LeaseLost):
                    await store.settle("s", zombie.relay, {}, [row], zombie.epochs["s"])
            case _:
                assert await store.give_rows_back("s", zombie.relay) == 0
        assert owner.query(STATE) == before


def test_the_judge_of_this_file_sees_duplicates_and_disorder() -> None:
    one: Any = StoredEvent(1, 0, "u", "t", "k", b"", "c", None, None, None)  # type: ignore[arg-type]
    two: Any = one._replace(id=2)
    assert repeated([one, two, one]) == {1}
    assert in_order([one, two, one])
    assert not in_order([two, one])
