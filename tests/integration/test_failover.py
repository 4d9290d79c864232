"""Failover and crashes that take commits back: nothing that the surviving server has is lost, hidden or not.

Behind a pooler a relay sees no connection break: what it holds of one server meets another one that gives out the same
ids and transaction numbers for other events.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.shop.arrivals import DeliveryChecker
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.memory_sink import MemorySink
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import PostgresServer
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import LOST, running, spec
from tests.support.replication import NAME, Pair
from tests.support.service import RelayService
from tests.support.shop import Report, Writers
from tests.support.wait import until

pytestmark = [pytest.mark.postgres, pytest.mark.xdist_group("failover")]

KEYS = 500
CUT_SHORT = "canceling wait for synchronous replication"
UNFLUSHED = {"wal_writer_delay": "10s"}
"""Commits that did not wait for the disk stay off it for a while."""


@pytest.fixture(scope="module")
def servers() -> Generator[Pair]:
    """Yield a primary and its synchronous standby."""
    with Pair() as pair:
        yield pair


@dataclass(frozen=True)
class Shop:
    """One database on a pair of servers."""

    pair: Pair
    name: str

    @property
    def database(self) -> Database:
        """It, on the server that is the primary now."""
        return Database(self.pair.primary, self.name)

    @property
    def dsn(self) -> str:
        """Both servers, and the one that takes writes is wanted."""
        hosts, ports = ",".join([LOOPBACK] * 2), ",".join(map(str, self.pair.ports))
        return make_conninfo(
            host=hosts, port=ports, dbname=self.name, user="postgres", target_session_attrs="read-write"
        )

    def forsake(self) -> None:
        """Cut the standby off from now on: a failover takes back what is committed."""
        self.pair.set_synchronous("")
        self.pair.wait_until_replayed()
        self.pair.detach()


@pytest.fixture
def shop(servers: Pair) -> Generator[Shop]:
    """Yield a database of its own; the servers are a pair again afterwards."""
    name = f"test_{uuid4().hex}"
    servers.primary.create_database(name)
    migrate(servers.primary.dsn(name))
    yield Shop(servers, name)
    if servers.standby is None:
        servers.replace()
    servers.set_synchronous(NAME)


@pytest.fixture
def pooler(servers: Pair) -> Generator[PgBouncer]:
    """Yield PgBouncer in front of the primary."""
    with PgBouncer(servers.primary) as pooler:
        yield pooler


def hidden_failover(pair: Pair, pooler: PgBouncer) -> None:
    """Lose the primary. Clients of the pooler only wait a little longer for their next answer."""
    pooler.pause()
    pair.fail_over()
    pooler.turn_to(pair.primary)
    pooler.resume()


# -- what is held of a server that is gone ----------------------------------------------------------------------


def emit(database: Database, keys: Sequence[str], payload: str = "x") -> list[str]:
    """Emit one event per key in one transaction; returns their uids."""
    with database.connect() as connection:
        events = [outbox.Event("test.event", payload, key=key) for key in keys]
        return [str(uid) for uid in outbox.emit_many(connection, events)]


def arrived(sink: MemorySink, wanted: Sequence[str]) -> None:
    """Wait until all of `wanted` have been delivered."""
    missing = set(wanted)

    def fact() -> bool:
        return not missing - {event.uid for event in sink.delivered}

    until(fact, seconds=20, what=f"{len(missing)} events are delivered")


@pytest.mark.slow
def test_a_commit_that_waits_for_a_standby_is_cut_short_and_settled_once(shop: Shop) -> None:
    """The standby is gone: a settlement is committed on the primary, and its wait is cancelled at its deadline.

    An event that fails meanwhile has one row, and the relay goes on without the standby.
    """
    failed: set[int] = set()

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        if event.key == "fails" and event.id not in failed:
            failed.add(event.id)
            return Failed("not yet")
        return DELIVERED

    sink = MemorySink(script)
    standby, primary = shop.pair.standby, shop.pair.primary
    assert standby is not None
    with running(shop.dsn, (spec("s"), sink), call_seconds=1.0, expects={"statement_failed", *LOST}) as harness:
        arrived(sink, emit(shop.database, ["a"]))
        standby.stop()
        with shop.database.connect() as connection:
            connection.execute("set local synchronous_commit = local")
            events = [outbox.Event("test.event", "x", key=key) for key in ["a", "fails"] * 10]
            emitted = list(map(str, outbox.emit_many(connection, events)))
        until(lambda: CUT_SHORT in primary.log.read_text(), seconds=20, what="the relay gives up waiting")
        until(lambda: len(failed) > 1, seconds=20, what="an event fails after another was written")
        standby.start()
        arrived(sink, emitted)
        harness.settled()
        rows = query(shop.database, "select count(*) from outbox.delivery")
        again = emit(shop.database, ["a", "fails"])
        arrived(sink, again)
    assert rows == [(0,)]
    uids = list(dict.fromkeys(event.uid for event in sink.delivered if event.key == "fails"))
    assert uids == [*emitted[1::2], again[1]], "the order of first deliveries"


# -- under load, with relays as processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdicts:
    """The judgement of a topic's records by the log of the surviving server."""

    report: Report
    phantoms: int
    """Events that arrived and are not on the surviving server: lost with their transactions."""


def survivors(database: Database) -> list[tuple[str, int, str]]:
    """Key, number and uid of every event that the server has."""
    return query(
        database,
        "select key, (convert_from(payload, 'UTF8')::jsonb ->> 'n')::bigint, uid::text from outbox.event order by id",
    )


def judge(kafka: KafkaBroker, topic: str, database: Database, seconds: float = 60) -> Verdicts:
    """Wait until everything that survived has arrived; judge it by uid, and phantoms apart.

    A phantom's number is given out again: what survived is in order among itself.
    """
    committed = set(survivors(database))
    wanted = {uid for _, _, uid in committed}
    found: list[tuple[str, int, str]] = []

    def all_there() -> bool:
        found[:] = [_arrival(r.value, r.headers["id"]) for r in kafka.read_all(topic, seconds=60)]
        return wanted <= {uid for _, _, uid in found}

    until(all_there, seconds=seconds, what=f"{len(wanted)} events arrive")
    arrivals = DeliveryChecker()
    for event in found:
        if event[2] in wanted:
            arrivals.add(*event)
    found_out = Verdicts(arrivals.result(committed), len({uid for _, _, uid in found} - wanted))
    sys.stdout.write(f"{found_out}\n")
    return found_out


def _arrival(value: bytes | None, uid: bytes | None) -> tuple[str, int, str]:
    event = json.loads(value or b"")
    return event["key"], event["n"], (uid or b"").decode()


def grown(writers: Writers, by: int) -> Callable[[], bool]:
    """Return a condition: this many more events are committed than now."""
    now = writers.total()
    return lambda: writers.total() > now + by


def pooled(text: str) -> str:
    """Return the same configuration with a DSN that leads to a pooler."""
    return text.replace("[relay]", 'pooler = "transaction"\n[relay]')


@pytest.fixture
def writers(shop: Shop) -> Generator[Writers]:
    """Yield writers that emit to whichever server takes writes; stopped in any case."""
    writers = Writers(shop.dsn, count=4, keys=KEYS, keys_per_transaction=20)
    writers.prepare()
    yield writers
    writers.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", [False, True], ids=["several hosts", "hidden by a pooler"])
def test_the_standby_that_is_promoted_lacks_the_last_commits(
    shop: Shop, pooler: PgBouncer, kafka: KafkaBroker, topic: str, tmp_path: Path, writers: Writers, *, hidden: bool
) -> None:
    """Surviving events are delivered in order; delivered events that are gone are phantoms, and counted."""
    kafka.create_topic(topic, partitions=3)
    text = kafka_config(pooler.dsn(shop.name) if hidden else shop.dsn, kafka, topic, lease_seconds=5)
    with RelayService(tmp_path, pooled(text) if hidden else text, expects=LOST) as relay:
        writers.start()
        until(grown(writers, 300), seconds=60, what="events are emitted")
        shop.forsake()
        kept = writers.total()
        until(grown(writers, 300), seconds=60, what="events are emitted that the standby lacks")
        until(lambda: len(kafka.read_all(topic)) > kept, seconds=60, what="some of them are delivered")
        before = set(survivors(shop.database))
        if hidden:
            hidden_failover(shop.pair, pooler)
        else:
            shop.pair.fail_over()
        until(grown(writers, 500), seconds=60, what="events are emitted to the new primary")
        writers.stop()
        found = judge(kafka, topic, shop.database)
        assert relay.process.poll() is None
    gone = before - set(survivors(shop.database))
    assert found.report.sound
    assert len(gone) > 0
    assert found.phantoms > 0
    # Everything that was made up was committed once. What was committed after the look above is gone too.
    assert found.phantoms <= len(gone) + 500


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", [False, True], ids=["direct", "hidden by a pooler"])
def test_a_crash_takes_back_commits_that_did_not_wait_for_the_disk(
    kafka: KafkaBroker, topic: str, tmp_path: Path, *, hidden: bool
) -> None:
    """Three crashes; what survived each is delivered in order, whatever was delivered of the rest."""
    kafka.create_topic(topic, partitions=3)
    with PostgresServer(UNFLUSHED) as server, ExitStack() as stack:
        server.create_database("shop")
        migrate(server.dsn("shop"))
        database = Database(server, "shop")
        pooler = stack.enter_context(PgBouncer(server)) if hidden else None
        text = kafka_config(pooler.dsn("shop") if pooler else database.dsn, kafka, topic, lease_seconds=5)
        writers = Writers(
            server.dsn("shop", options="-c synchronous_commit=off"), count=4, keys=KEYS, keys_per_transaction=20
        )
        writers.prepare()
        with RelayService(tmp_path, pooled(text) if hidden else text, expects=LOST):
            writers.start()
            taken_back = 0
            for _ in range(3):
                until(grown(writers, 300), seconds=60, what="events are emitted")
                if pooler:
                    pooler.pause()
                before = set(survivors(database))
                server.restart("immediate")
                taken_back += len(before - set(survivors(database)))
                if pooler:
                    pooler.resume()
            until(grown(writers, 300), seconds=60, what="events are emitted after the last crash")
            writers.stop()
            found = judge(kafka, topic, database)
        assert found.report.sound
        assert taken_back > 0, "every commit was on disk"
