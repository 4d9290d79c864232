"""`doctor` on real databases: each condition is made, and found; a healthy system has no finding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from outbox_relay import admin
from outbox_relay.admin.doctor import doctor, log, server
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database
from tests.support.days import fill_days
from tests.support.findings import EXPECTED, a_served_sink, findings
from tests.support.ledger import Ledger, ledger
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import running, spec
from tests.support.wait import until


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one live relay that owns the shards of one sink, all at the end of the log."""
    with a_served_sink(database) as found:
        yield found


def test_a_healthy_system_has_no_finding(books: Ledger) -> None:
    assert findings(books) == {}


def test_a_database_that_serves_a_relay_has_no_finding(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness, ledger(database) as books:
        books.emit(*"abc")
        harness.owns_all()
        harness.settled()
        assert findings(books) == {}


Make = Callable[[Ledger], Any]
CONDITIONS: dict[str, Make] = {  # each leaves the earlier ones; a paused sink hides others
    "shards-unowned": lambda books: books.do(
        "update outbox.shard set owner = null, released_at = now() - interval '1 minute' where shard = 7"
    ),
    "destination-down": lambda books: books.do(
        "update outbox.sink set circuit = 'open', circuit_since = now() - interval '6 minutes', last_error = 'refused',"
        " last_error_at = now()"
    ),
    "types-without-a-route": lambda books: books.emit("k", type="odd.type"),
    "relay-versions": lambda books: books.do(
        "insert into outbox.relay (id, name, version, sinks) values (gen_random_uuid(), 'relay-2', '9.9', '{}')"
    ),
    "relay-configurations": lambda books: books.do(
        "update outbox.relay set config = '{\"park_after_seconds\": 1}';"
        "insert into outbox.relay (id, name, version, sinks, config)"
        " select gen_random_uuid(), 'relay-2', version, '{}', '{\"park_after_seconds\": 2}' from outbox.relay"
    ),
    "schedule-late": lambda books: books.do(
        "insert into outbox.schedule (name, cron, timezone, type, payload, missed, after_at, next_at) values"
        " ('a', '0 3 * * *', 'UTC', 'test.a', '{}', 'one', now() - interval '1 day', now() - interval '2 minutes')"
    ),
    "schedule-refused": lambda books: books.do(
        "insert into outbox.schedule (name, cron, timezone, type, payload, missed, error, error_at, retry_at)"
        " values ('nightly', '0 3 * * *', 'UTC', 'test.a', '{}', 'one', 'too large', now(), now())"
    ),
    "schedule-failing": lambda books: books.do(
        "insert into outbox.schedule (name, cron, timezone, type, payload, missed, error, error_at)"
        " values ('martian', '0 3 * * *', 'Mars/Olympus', 'test.a', '{}', 'one', 'no such time zone', now())"
    ),
    "clock-jumped": lambda books: books.do("update outbox.retention set hold_until = now() + interval '1 day'"),
    "default-partition": lambda books: books.do(
        "insert into outbox.event (shard, uid, type, payload, content_type, created_at)"
        " values (0, gen_random_uuid(), 'test.a', '', 't', now() + interval '900 days')"
    ),
    "sequence-cache": lambda books: books.do("alter sequence outbox.event_id_seq cache 20"),
    "row-level-security": lambda books: books.do("alter table outbox.uid enable row level security"),
    "foreign-privileges": lambda books: books.do("grant select on outbox.event to public"),
    "sink-paused": lambda books: admin.pause(books.store, "s", actor="anna", reason="moving house"),
    "missing-positions": lambda books: books.do(
        "alter table outbox.progress disable trigger user; delete from outbox.progress;"
        "alter table outbox.progress enable trigger user"
    ),
    "no-relay": lambda books: books.do("delete from outbox.relay; update outbox.shard set owner = null"),
}


def test_every_condition_is_found(books: Ledger) -> None:
    for condition, make in CONDITIONS.items():
        make(books)
        found = findings(books)
        assert condition in found
        assert (found[condition].evidence, found[condition].advice) > ("", "")


def test_a_privilege_that_was_revoked_is_found_and_granted_again_by_migrate(books: Ledger) -> None:
    """Goes red when a relay that may not read the log delivers nothing, and doctor finds nothing."""
    books.do("create role lost")
    try:
        assert inside("migrate", "--grant-relay", "lost", "--dsn", books.database.dsn).code == 0
        assert "missing-privileges" not in findings(books)
        for statement in ("select on outbox.event from lost", "update on outbox.shard from lost"):
            books.do(f"revoke {statement}")
            found = (findings(books))["missing-privileges"]
            assert 'role "lost" (relay) lacks 1 of its privileges, such as' in found.evidence
            assert inside("migrate", "--dsn", books.database.dsn).code == 0
            assert "missing-privileges" not in findings(books)
        books.do("revoke usage on schema outbox from lost; revoke execute on function outbox_internal.tick from lost")
        assert "lacks 2 of its privileges" in (findings(books))["missing-privileges"].evidence
    finally:
        books.do("drop owned by lost; drop role lost")


def test_an_old_event_and_a_dead_letter_are_found(books: Ledger) -> None:
    old, dead = books.emit("a", "b")
    books.do("update outbox.event set created_at = created_at - interval '10 minutes' where id = %s", old)
    books.park("s", books.row(dead, "dead"))
    found = findings(books)
    assert found.keys() == {"sink-behind", "dead-letters"}
    assert "10 min" in found["sink-behind"].evidence
    assert [each.id for each in doctor(books.store, oldest_seconds=900.0) if each.id not in EXPECTED] == [
        "dead-letters"
    ]


def test_days_that_are_kept_are_found_with_their_reason(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 36, 33)
    found = findings(books)
    assert "kept by sink s with 64 shards" in found["retention-blocked"].evidence
    assert "retention-idle" in found


def test_partitions_that_are_missing_are_found(books: Ledger) -> None:
    [(ahead,)] = books.store.named("doctor_partitions", {})
    assert not list(log.examine_partitions(0, ahead))
    for (table,) in books.query(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'outbox.event'::regclass"
        " and pg_get_expr((select relpartbound from pg_class where oid = inhrelid), inhrelid) <> 'DEFAULT'"
    ):
        books.do(f"drop table {table}")
    [(today,)] = books.store.named("doctor_partitions", {})
    assert today <= 86_400, "today counts as if it had a partition"
    assert "partitions-missing" in findings(books)


@contextmanager
def waiting(books: Ledger, first: psycopg.Connection[Any], statement: str, sessions: int = 1) -> Generator[None]:
    """Let other sessions run a statement that waits for `first`, which is rolled back at the end."""

    def wait() -> None:
        with books.database.connect() as other:
            other.execute("set lock_timeout = '30s'")
            other.execute(statement.encode())

    threads = [threading.Thread(target=wait) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        first.rollback()
        for thread in threads:
            thread.join(30)


def waits_seen(books: Ledger, sessions: int = 1) -> list[Any]:
    """Wait until as many sessions are seen to wait, and return their rows."""

    def seen() -> list[Any]:
        rows = books.store.named("doctor_locks", {"seconds": 0.0})
        return rows if len(rows) == sessions else []

    return until(seen, seconds=20, what="the waits are seen")


def test_long_transactions_and_waits_for_locks_are_found(books: Ledger) -> None:
    with books.database.connect() as first:
        first.execute("select pg_current_xact_id()")
        first.execute("lock table outbox.sink in access share mode")
        with waiting(books, first, "lock table outbox.sink in access exclusive mode"):
            [wait] = server.examine_locks(waits_seen(books))
            assert f"blocked by {first.info.backend_pid}" in wait.evidence
            assert "outbox.sink" in wait.evidence
            assert [_pid(statement) for statement in wait.statements] == [first.info.backend_pid]
            [long] = server.examine_transactions(books.store.named("doctor_transactions", {"seconds": 0.0}))
            assert f"pid {first.info.backend_pid}, role postgres, idle in transaction" in long.evidence
    assert books.store.named("doctor_transactions", {"seconds": 1.0}) == []


def _pid(statement: str) -> int:
    return int(statement.split("pid = ")[1].split(maxsplit=1)[0])


def test_a_statement_of_a_finding_ends_that_transaction_and_no_later_one(books: Ledger) -> None:
    with books.database.connect() as forgotten:
        forgotten.execute("select pg_current_xact_id()")
        [long] = server.examine_transactions(books.store.named("doctor_transactions", {"seconds": 0.0}))
        [ending] = [each for each in long.statements if _pid(each) == forgotten.info.backend_pid]
        forgotten.commit()
        forgotten.execute("select pg_current_xact_id()")
        assert books.query(ending) == []
        [long] = server.examine_transactions(books.store.named("doctor_transactions", {"seconds": 0.0}))
        [ending] = [each for each in long.statements if _pid(each) == forgotten.info.backend_pid]
        assert books.query(ending) == [(True,)]
        with pytest.raises(psycopg.OperationalError):
            forgotten.execute("select 1")


def test_no_statement_ends_a_session_that_waits_itself(books: Ledger) -> None:
    """One that is ahead in the queue blocks too, and is no culprit."""
    with books.database.connect() as first:
        first.execute("lock table outbox.sink in access share mode")
        with waiting(books, first, "lock table outbox.sink in access exclusive mode", sessions=2):
            [wait] = server.examine_locks(waits_seen(books, sessions=2))
            assert [_pid(statement) for statement in wait.statements] == [first.info.backend_pid]


@pytest.mark.slow
def test_a_log_that_is_locked_hides_only_what_is_in_it(books: Ledger) -> None:
    books.do("alter sequence outbox.event_id_seq cache 20")
    books.register(("s", ["*"], "beginning"))
    books.do("update outbox.sink set paused = true")
    with books.database.connect() as other:
        other.execute("lock table outbox.event in access exclusive mode")
        found = doctor(books.store)
    unseen = [each for each in found if each.id == "not-examined"]
    summaries = [each.summary for each in unseen]
    assert {"not examined: backlog of sink s", "not examined: types without a route"} <= {*summaries}
    assert len(summaries) == len({*summaries})
    assert {each.advice for each in unseen} == {"run it again: the server is busy, or a lock is held"}
    assert {"sequence-cache", "sink-paused"} <= {each.id for each in found}


def test_a_careless_server_is_found_and_the_exit_code_says_so() -> None:
    """Everything but fsync: the tests' server has it on here."""
    settings = {"autovacuum": "off", "full_page_writes": "off", "synchronous_commit": "off"}
    with PostgresServer(settings, fsync=True) as careless:
        careless.create_database("careless")
        migrate(careless.dsn("careless"))
        ended = inside("doctor", "--json", "--dsn", careless.dsn("careless"))
        assert ended.code == 1
        found = {each["id"]: each for each in ended.json["findings"]}
        assert found.keys() == {"autovacuum-off", "durability-off", "synchronous-commit-off"}
        assert "full_page_writes" in found["durability-off"]["evidence"]
        assert [each["severity"] for each in ended.json["findings"]] == ["critical", "critical", "warning"]
        parts = {"id", "severity", "summary", "evidence", "advice", "statements", "runbook"}
        assert found["durability-off"].keys() == parts
