"""From the version before: its relay works on the schema of today, and what its schema holds is brought forward."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from outbox_relay import __version__
from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema_versions import SCHEMA_VERSION
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.earlier import LAST_OF, Earlier
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, after, chosen, say
from tests.support.roles import new_role
from tests.support.service import RelayService
from tests.support.upgrades import behind, config, left
from tests.support.wait import until

KEYS = 20
FAR_AHEAD = "20000-01-01"
"""A year that PostgreSQL knows and Python does not; earlier versions took it."""
BIG_BYTES = 2_000_000
"""Above the ceiling of payloads; in earlier versions a session could raise it."""
EVERY_STATE = {
    ("dead", False, False),
    ("held", False, False),
    ("waiting", False, False),
    ("waiting", True, False),
    ("waiting", False, True),
}
"""Of rows: the state, whether a relay has leased it, and whether it is scheduled."""
EACH = [pytest.param(version, marks=pytest.mark.thorough) for version in LAST_OF]
"""Every earlier version. Each test installs a relay of it, which takes long."""
LAST_THAT_LOCKS = 9
"""The last version to which a migration locks the log, so that it cannot work beside an open transaction."""
OLD = """insert into outbox.event (uid, type, payload, content_type, created_at)
select gen_random_uuid(), 'order.old', '1', 'application/json', now() + age * interval '1 day'
  from generate_series(-2, 2) age"""

LIMITS = "select rate_per_second, max_in_flight_total, spread_seconds from outbox.sink"


@pytest.fixture
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    """Return the package of an earlier schema version."""
    package = Earlier(request.param, tmp_path / "earlier")
    assert package.is_what_runs()
    return package


@pytest.fixture
def old_database(empty_database: Database, earlier: Earlier) -> Database:
    """Return a database with the earlier schema, made by the earlier package."""
    earlier.run("migrate", "--dsn", empty_database.dsn)
    assert query(empty_database, "select schema_version from outbox.meta") == [(earlier.version,)]
    return empty_database


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@dataclass
class Producer:
    """A thread that emits in SQL, as applications of any version do: per key events 1, 2, 3 and so on."""

    dsn: str
    uids: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """uid → key and number, of what is committed."""
    failed: list[psycopg.Error] = field(default_factory=list[psycopg.Error])
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Producer:
        self._thread = threading.Thread(target=self._emit, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Finish the transaction under way."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the producer did not stop"

    def more(self, events: int) -> None:
        """Wait until this number of further events is committed."""
        wanted = len(self.uids) + events
        until(lambda: self.failed or len(self.uids) >= wanted, seconds=60, what=f"{events} more events are committed")

    def _emit(self) -> None:
        numbers: dict[str, int] = defaultdict(int)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                while not self._stop.is_set():
                    made: dict[str, tuple[str, int]] = {}
                    with connection.transaction():
                        for key in (f"key-{(len(self.uids) + place) % KEYS}" for place in range(3)):
                            numbers[key] += 1
                            [(uid,)] = connection.execute(
                                "select outbox.emit('order.made', %s::text::jsonb, key => %s)::text",
                                (str(numbers[key]), key),
                            ).fetchall()
                            made[uid] = (key, numbers[key])
                    self.uids.update(made)
                    self._stop.wait(0.005)
        except psycopg.Error as error:
            self.failed.append(error)


@pytest.mark.thorough
@pytest.mark.parametrize("earlier", [32], indirect=True)
def test_the_index_of_leases_is_used_at_once_beside_a_transaction_that_has_written(old_database: Database) -> None:
    """Goes red when it is built over HOT chains, of which the transaction may see an older version."""
    with old_database.connect() as writer:
        writer.execute("select pg_current_xact_id()")
        query(old_database, "insert into outbox.shard (sink, shard) values ('none', 0)")
        for _ in range(5):
            query(old_database, "update outbox.shard set lease_until = now()")
        migrate(old_database.dsn)
        unused = "select indcheckxmin, indisclustered from pg_index where indrelid = 'outbox.shard'::regclass"
        assert query(old_database, unused) == [(False, False)] * 2


def owned(database: Database, shares: list[int]) -> None:
    """Wait until each relay owns this number of shards."""
    found = "select count(*) from outbox.shard where owner is not null group by owner"
    until(lambda: [n for (n,) in query(database, found)] == shares, seconds=30, what=f"relays own {shares} shards")


def assert_in_order(receiver: Receiver, producer: Producer) -> None:
    """Assert that the first deliveries of each key came in the order in which they were committed."""
    firsts = dict.fromkeys(receiver.uids)
    order: dict[str, list[int]] = defaultdict(list)
    for uid in firsts:
        key, number = producer.uids[uid]
        order[key].append(number)
    assert all(numbers == sorted(numbers) for numbers in order.values())


# -- an earlier relay on the schema of today -----------------------------------------------------------------------


@pytest.mark.parametrize("earlier", EACH, indirect=True)
def test_an_earlier_relay_goes_on_while_the_schema_changes_and_shares_with_one_of_today(
    old_database: Database, earlier: Earlier, receiver: Receiver, tmp_path: Path
) -> None:
    """The migration waits no longer than its locks say; whichever relay is told to stop, the other goes on.

    The file of the relay of today has limits, which the earlier one does not know and leaves as they are.
    """
    with new_role(old_database, "app") as app, new_role(old_database, "relay") as relay:
        earlier.run("migrate", "--dsn", old_database.dsn, "--grant-emit", app, "--grant-relay", relay)
        text, locks = config(old_database.dsn_as(relay), receiver), earlier.version < LAST_THAT_LOCKS
        with (
            # Locks of a migration on the log outlast its ticks; its log does not name the reason of a restart.
            RelayService(tmp_path, text, "old", expects={"unknown"} if locks else set(), **earlier.environment) as old,
            Producer(old_database.dsn_as(app)) as producer,
        ):
            producer.more(100)
            if locks:
                refused_beside_a_long_transaction(old_database)
                producer.more(100)
            limits = 'type = "webhook"\nrate_per_second = 5000\nmax_in_flight_total = 500\nspread_seconds = 1\n'
            limited = text.replace('type = "webhook"\n', limits, 1)
            roll_out(old_database, producer, receiver, old, RelayService(tmp_path, limited, "new"), earlier.release)
            assert query(old_database, LIMITS) == [(5000, 500, 1)]


def roll_out(
    database: Database, producer: Producer, receiver: Receiver, old: RelayService, new: RelayService, release: str
) -> None:
    """Migrate beside the earlier relay, add one of today, stop it, start it again, and stop the earlier one."""
    assert migrate(database.dsn).after == SCHEMA_VERSION
    producer.more(100)
    with new:
        owned(database, [SHARDS // 2, SHARDS // 2])
        said = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
        [found] = [each for each in said if each["id"] == "relay-versions"]
        assert found["evidence"] == f"versions: {release}, {__version__}"
        producer.more(200)
        assert new.stop() == 0
        owned(database, [SHARDS])
        producer.more(200)
        new.start()
        owned(database, [SHARDS // 2, SHARDS // 2])
        producer.more(200)
        assert old.stop() == 0
        owned(database, [SHARDS])
        producer.more(200)
        producer.stop()
        assert not producer.failed
        until(lambda: set(receiver.uids) >= set(producer.uids), seconds=60, what="every event arrives")
        assert set(receiver.uids) == set(producer.uids)
        assert_in_order(receiver, producer)
        assert new.stop() == 0
    assert_told(database, list(producer.uids))


def assert_told(database: Database, uids: list[str]) -> None:
    """Raise AssertionError if a delivered event is shown as anything else; the last ones are known to be delivered.

    An event whose request was slow has a record of its delivery.
    """
    assert states(database, uids) <= {"settled", "delivered", "unknown"}
    assert states(database, uids[-100:]) <= {"settled", "delivered"}


def states(database: Database, uids: list[str]) -> set[str]:
    """Return the states that events have in the only sink."""
    each = "select distinct s.state from unnest(%s::uuid[]) u cross join lateral outbox.event_states(u) s"
    return {row[0] for row in query(database, each, uids)}


def refused_beside_a_long_transaction(database: Database) -> None:
    """Assert that a migration gives up while a transaction does not end, and has changed nothing."""
    with database.connect() as forgotten:
        forgotten.execute("select outbox.emit('order.forgotten', '0')")
        with pytest.raises(DatabaseUnavailable, match="in a transaction for"):
            migrate(database.dsn)
        forgotten.rollback()


# -- what an earlier schema holds ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [1, *EACH[1:]], indirect=True)
def test_what_an_earlier_schema_holds_is_delivered_or_dead_after_the_migration(
    old_database: Database, earlier: Earlier, receiver: Receiver, tmp_path: Path
) -> None:
    with new_role(old_database, "app") as app, new_role(old_database, "relay") as relay:
        earlier.run("migrate", "--dsn", old_database.dsn, "--grant-emit", app, "--grant-relay", relay)
        text = config(old_database.dsn_as(relay), receiver)
        receiver.answer = chosen(troubled)
        with RelayService(tmp_path, text, "old", **earlier.environment) as old:
            own = fill(old_database, app)
            old.kill()
        poison = leave_unread(old_database, app, odd=earlier.version == 1)
        delivered = {request.uid for request in receiver.requests if request.header("outbox-key") is None}

        outcome = migrate(old_database.dsn)
        assert (outcome.before, outcome.after) == (earlier.version, SCHEMA_VERSION)
        assert {f"emit to {app}", f"relay to {relay}"} <= set(outcome.granted)
        assert own == emit(old_database, app, "1", f"uid => '{own}'"), "emitted before, so nothing is emitted"
        with old_database.connect(user=app) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select from outbox.event")

        receiver.answer = say(204)
        before = len(receiver.requests)
        with old_database.connect() as owner:
            owner.execute("update outbox.delivery set due_at = now() where state <> 'dead' and deliver_at is null")
        with RelayService(tmp_path, text, "new") as new:
            until(lambda: not left(old_database, receiver), seconds=60, what="every event is delivered or dead")
            assert new.stop() == 0
        dead = dict(query(old_database, "select uid::text, key from outbox.delivery"))
        assert dead == {**dict.fromkeys(poison), **{uid: key for uid, key in dead.items() if key == "dead"}}
        again = [request.uid for request in receiver.requests[before:]]
        assert not set(again) & delivered, "what was settled does not come again"
        assert len(again) == len(set(again))


def troubled(request: Request) -> Behaviour:
    """Return the fault of the destination for a request: some keys are refused, fail, or time out."""
    match request.header("outbox-key"):
        case "dead":
            return say(400)
        case "waiting":
            return say(500)
        case "slow":
            return after(60, say(204))
        case _:
            return say(204)


def fill(database: Database, app: str) -> str:
    """Leave something of everything behind a running relay; the uid that an emitter chose for one event."""
    own = str(uuid4())
    emit(database, app, "1", f"uid => '{own}'")
    for key in ("dead", "waiting", "waiting", "slow", "good", "good"):
        emit(database, app, "1", f"key => '{key}'")
    emit(database, app, "1", "deliver_at => now() + interval '20 seconds'")
    states = "select distinct state, lease_until is not null, deliver_at is not null from outbox.delivery"
    until(lambda: set(query(database, states)) >= EVERY_STATE, seconds=30, what="there are rows in every state")
    until(lambda: behind(database) == [], seconds=30, what="every position is behind what was emitted")
    return own


def leave_unread(database: Database, app: str, *, odd: bool) -> list[str]:
    """Emit while no relay runs, into several partitions. Return the uids of what only version 1 took, if `odd`."""
    with database.connect() as owner:
        owner.execute("select outbox.make_partitions(5)")
        owner.execute(OLD)
    emit(database, app, "2", "key => 'good'")
    taken: list[str] = []
    if odd:
        far = emit(database, app, "1", f"deliver_at => '{FAR_AHEAD}'")
        taken = [far, emit(database, app, f'"{"x" * BIG_BYTES}"')]
    emit(database, app, "3", "key => 'good'")
    return taken


def emit(database: Database, user: str, payload: str, *options: str) -> str:
    """Emit one event as an application does, with the limit of payloads that a session could set; its uid."""
    with database.connect(user=user) as connection:
        connection.execute("set outbox.max_payload_bytes = 9000000")
        call = f"select outbox.emit({', '.join(['%s', '%s::text::jsonb', *options])})::text"
        [(uid,)] = connection.execute(call.encode(), ("order.made", payload)).fetchall()
    return uid
