"""The server's version changes under a log that is partly delivered: nothing is lost, not everything comes again."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.postgres import SUPERUSER, PostgresServer
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService
from tests.support.wait import until

BEFORE, AFTER = 15, 18
"""Versions of which all programs are there, pg_upgrade among them."""
NAME = "shop"
BATCH = 200
UPGRADE_SECONDS = 180
FORGET_VERSIONS = b"update pg_attribute set attoptions = null where attoptions::text like '{pg_attver=%'"
"""PostgreSQL 15.20 keeps a number among the options of every column and leaves it out of its own dumps. The wheel's
pg_dump is older, does not know it, and would write an option that no server takes."""
CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
timeout_seconds = 3
allow_http = true
allow_networks = ["127.0.0.0/8"]
[sinks.crm.retry]
base_seconds = 3600
[routes]
"*" = ["crm"]
"""


@pytest.fixture
def before() -> Generator[PostgresServer]:
    with PostgresServer(major=BEFORE) as server:
        yield server


@contextmanager
def upgraded(old: PostgresServer) -> Generator[PostgresServer]:
    """Yield a server of the newer version that pg_upgrade filled from ``old``, which stays stopped."""
    with old.connect(NAME) as connection:
        connection.execute(FORGET_VERSIONS)
    old.stop()
    old.run("pg_checksums", "--enable", "--pgdata", old.data)  # as the newer version has them unless told otherwise
    with PostgresServer(major=AFTER) as new:
        new.stop()
        programs = "--old-bindir", old.bin("postgres").parent, "--new-bindir", new.bin("postgres").parent
        new.run(
            "pg_upgrade", "--username", SUPERUSER, "--socketdir", new.directory, *programs,
            "--old-datadir", old.data, "--new-datadir", new.data,
            "--old-port", str(old.port), "--new-port", str(new.port),
            seconds=UPGRADE_SECONDS,
        )  # fmt: skip
        new.start()
        yield new


def emit(database: Database, numbers: Iterable[int]) -> set[str]:
    """Emit one event for each number, each in a transaction of its own. Return their uids."""
    with database.connect(autocommit=True) as connection:
        emitted = "select outbox.emit('order.made', %s::text::jsonb, key => %s)::text"
        return {
            uid
            for number in numbers
            for (uid,) in connection.execute(emitted, (str(number), f"key-{number % 10}")).fetchall()
        }


def config(dsn: str, receiver: Receiver) -> str:
    """Return settings with one webhook for every type; what fails waits until a test makes it due."""
    return CONFIG.format(dsn=dsn, url=receiver.url, secret=SECRET)


def behind(database: Database) -> list[tuple[str]]:
    """Return the uids of the log that the position of their shard has not passed."""
    return query(
        database,
        "select e.uid::text from outbox.event e join outbox.standing p on p.shard = e.shard "
        "where e.id > greatest(p.a_seq, p.last_id)",
    )


def left(database: Database, receiver: Receiver) -> set[str]:
    """Return the uids of events that are neither delivered nor dead."""
    states = query(database, "select uid::text, state from outbox.delivery")
    dead = {uid for uid, state in states if state == "dead"}
    events = {uid for (uid,) in query(database, "select uid::text from outbox.event")}
    return {uid for uid, state in states if state != "dead"} | (events - dead - set(receiver.uids))


def deliver_some(old: Database, receiver: Receiver, relay: RelayService) -> tuple[set[str], set[str]]:
    """Deliver one batch, lose the destination behind another; return the uids of the first, and of both."""
    with relay:
        settled = emit(old, range(BATCH))
        until(lambda: set(receiver.uids) >= settled, seconds=60, what="the first batch arrives")
        until(lambda: not behind(old), seconds=30, what="every position has passed it")
        receiver.answer = say(503)
        emitted = emit(old, range(BATCH, 2 * BATCH))
        until(lambda: len(receiver.requests) > BATCH, seconds=30, what="the destination is found to be down")
        assert relay.stop() == 0
    receiver.answer = say(204)
    return settled, settled | emitted


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_nothing_is_lost_when_pg_upgrade_moves_the_log_to_a_newer_version(
    before: PostgresServer, tmp_path: Path
) -> None:
    """Emits go on before the rebase and after it; a relay that is started in between refuses to run."""
    before.create_database(NAME)
    old = Database(before, NAME)
    migrate(old.dsn)
    with Receiver() as receiver:
        settled, emitted = deliver_some(old, receiver, RelayService(tmp_path, config(old.dsn, receiver), "old"))
        with upgraded(before) as after:
            new = Database(after, NAME)
            emitted |= emit(new, range(2 * BATCH, 3 * BATCH))
            relay = RelayService(tmp_path, config(new.dsn, receiver), "new")
            with relay.start(wait=False):
                assert relay.ended(60) == 2
            assert "outbox-relay rebase" in relay.log.read_text()
            arrived = len(receiver.requests)
            assert inside("rebase", "--dsn", new.dsn).code == 0
            emitted |= emit(new, range(3 * BATCH, 4 * BATCH))
            with relay.start():
                until(lambda: not left(new, receiver), seconds=60, what="every event is delivered")
                assert relay.stop() == 0
    assert set(receiver.uids) == emitted
    assert not settled & set(receiver.uids[arrived:]), "what positions had passed does not come again"
