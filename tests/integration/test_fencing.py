"""A relay that cannot renew its leases stops by itself, and what it still writes changes nothing.

Its own clock stops it, whatever kept it from renewing. Threads that stand still one by one are simulated: see
``tests.simulation``.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import LeaseLost, StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.rows import NewRow
from outbox_relay.sinks.calls import Call, Completions, Sink
from tests.support.database import Database
from tests.support.deliveries import emit
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, after, chosen, say
from tests.support.receiver.signatures import SECRET
from tests.support.relay_harness import LOST, running, spec
from tests.support.service import RelayService
from tests.support.wait import until

STOPPED = {"lease_lost", *LOST}
"""Why the session of a relay ends that was stopped or cut off for longer than its lease."""


CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
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


@pytest.mark.fence("a relay that lost a shard delivers")
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


def zombie_and_owner(database: Database, store: Any) -> tuple[Ledger, Ledger]:
    """Return two relays: the first owned every shard of ``s``, and the second owns them now."""
    zombie, owner = Ledger(database, store), Ledger(database, store)
    zombie.register(("s", ["*"], "beginning"))
    zombie.own("s")
    zombie.do("update outbox.session set lease_until = clock_timestamp() - interval '1 second'")
    assert len(owner.own("s")) == SHARDS
    return zombie, owner


STATE = """select (select jsonb_agg(s order by s.sink, s.shard) from outbox.shard s)
                , (select jsonb_agg(p order by p.seq) from outbox.progress p)
                , (select jsonb_agg(d order by d.id) from outbox.delivery d)"""


@pytest.mark.fence("a relay that lost a shard settles rows")
def test_what_a_zombie_writes_changes_nothing(database: Database) -> None:
    """Goes red when one of its statements no longer compares the owner and the epoch."""
    with ledger(database) as hand:
        zombie, owner = zombie_and_owner(database, hand.store)
        [event, late] = owner.emit("a", "b")
        owner.park("s", owner.row(event, lease=uuid4(), lease_for=60.0))
        before, store = owner.query(STATE), hand.store
        assert store.renew_sessions(zombie.relay, ["s"], 60.0) == {"s": {}}
        for relay, epochs in ((zombie, zombie), (zombie, owner), (owner, zombie)):
            store.release_shards("s", relay.relay, epochs.epochs["s"])
            store.reset_crashes("s", relay.relay, epochs.epochs["s"])
        assert store.reclaim_shards("s", zombie.relay) == []
        row: NewRow = zombie.row(late)
        for relay, epochs in ((zombie, zombie), (zombie, owner), (owner, zombie)):
            with pytest.raises(LeaseLost):
                store.settle("s", relay.relay, {}, [row], epochs.epochs["s"])
        assert store.give_rows_back("s", zombie.relay) == 0
        store.end_session("s", zombie.relay)
        assert owner.query(STATE) == before


class QueuedSink(Sink):
    """A client with a queue, as Kafka's: a thread of its own sends an event every 20 ms, whatever its loop does."""

    max_batch, max_in_flight, keeps_order = 10, 64, True

    def __init__(self) -> None:
        self.sent: list[float] = []
        """When an event was sent, by ``lease_clock()``."""
        self._queue: deque[tuple[Call, list[Verdict]]] = deque()
        self._completions = Completions[Call]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self.wake = self._completions.wake  # type: ignore[method-assign]

    def open(self) -> None:
        threading.Thread(target=self._send, daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def submit(self, call: Call) -> None:
        self._queue.append((call, []))

    def _send(self) -> None:
        while not self._over.wait(0.02):
            with self._lock:
                if self._queue:
                    self.sent.append(lease_clock())
                    self._answer(DELIVERED)

    def _answer(self, verdict: Verdict) -> None:
        call, verdicts = self._queue[0]
        verdicts.append(verdict)
        if len(verdicts) == len(call.events):
            self._queue.popleft()
            call.end(verdicts)
            self._completions.put(call)

    def completed(self, seconds: float) -> Sequence[Call]:
        return self._completions.take(seconds)

    def purge(self) -> None:
        with self._lock:
            while self._queue:
                self._answer(Unavailable("purged"))

    def withdraw(self) -> None:
        self.purge()
        self._completions.take(0)


@pytest.mark.fence("a relay that lost a shard delivers")
def test_a_relay_whose_loop_stands_still_beyond_its_lease_sends_nothing_more(database: Database) -> None:
    """Goes red without the watchdog, and when nothing is asked of the clock before events are handed over again."""
    sink, arrived, stuck, awake = QueuedSink(), list[float](), threading.Event(), threading.Event()

    def record(_event: StoredEvent, _attempt: int) -> Verdict:
        arrived.append(lease_clock())
        return DELIVERED

    with running(database.dsn, (spec("s"), sink), lease_seconds=3.0, expects={*STOPPED, "statement_failed"}) as harness:
        harness.owns_all()
        store: Any = harness.store
        settle, renew = store.settle, store.renew_sessions

        def stand_still(*given: Any, **more: Any) -> None:
            stuck.set()
            awake.wait(60)
            settle(*given, **more)

        def fail(*_: Any) -> None:
            raise StatementFailed("the database did not answer", "57014")

        store.settle, store.renew_sessions = stand_still, fail
        emit(database, [None] * 600)
        until(stuck.is_set, seconds=20, what="the loop stands still")
        with running(database.dsn, (spec("s"), MemorySink(record)), lease_seconds=3.0):
            until(lambda: len(arrived) > 0, seconds=30, what="another relay owns its shards")
            sent = len(sink.sent)
            assert 0 < sent < 600
            assert sink.sent[-1] < arrived[0]
            awake.set()
            until(lambda: len(harness.ended) > 0, seconds=20, what="the session ends")
            assert len(sink.sent) == sent
            store.settle, store.renew_sessions = settle, renew
