"""`doctor` on real databases: each condition is made, and found; a healthy system has no finding."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
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
from tests.support.replays import start as start_replay
from tests.support.roles import new_role
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
CONDITIONS: dict[str, Make] = {
    "no-relay": lambda books: books.do("delete from outbox.relay; update outbox.shard set owner = null"),
    "shards-unowned": lambda books: books.do(
        "update outbox.shard set owner = null, released_at = now() - interval '1 minute' where shard = 7"
    ),
    "missing-positions": lambda books: books.do(
        "alter table outbox.progress disable trigger user; delete from outbox.progress;"
        "alter table outbox.progress enable trigger user"
    ),
    "sink-paused": lambda books: admin.pause(books.store, "s", actor="anna", reason="moving house"),
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
        " values ('nightly', '0 3 * * *', 'Mars/Olympus', 'test.a', '{}', 'one', 'no such time zone', now())"
    ),
    "clock-jumped": lambda books: books.do("update outbox.retention set hold_until = now() + interval '1 day'"),
    "default-partition": lambda books: books.do(
        "insert into outbox.event (shard, uid, type, payload, content_type, created_at)"
        " values (0, gen_random_uuid(), 'test.a', '', 't', now() + interval '900 days')"
    ),
    "sequence-cache": lambda books: books.do("alter sequence outbox.event_id_seq cache 20"),
    "row-level-security": lambda books: books.do("alter table outbox.uid enable row level security"),
    "foreign-privileges": lambda books: books.do("grant select on outbox.event to public"),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_found(books: Ledger, condition: str) -> None:
    CONDITIONS[condition](books)
    found = findings(books)
    assert condition in found
    assert found[condition].evidence
    assert found[condition].advice


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


def test_an_event_of_no_time_is_an_old_one(books: Ledger) -> None:
    [old] = books.emit("a")
    books.do("update outbox.event set created_at = '-infinity' where id = %s", old)
    assert "sink-behind" in findings(books)
    found = admin.status(books.store)
    assert json.dumps(found["sinks"]["s"], allow_nan=False)


def test_a_paused_replay_is_found(books: Ledger) -> None:
    books.emit("a")
    books.catch_up("s")
    number = start_replay(books.database, key="a")
    books.do("select outbox.set_replay(%s, 'pause', 'anna', null)", number)
    found = findings(books)
    assert str(number) in found["replay-paused"].advice


def test_days_that_are_kept_are_found_with_their_reason(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 36, 33)
    found = findings(books)
    assert "kept by sink s with 64 shards" in found["retention-blocked"].evidence
    assert "retention-idle" in found


def test_days_that_no_relay_empties_are_found(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 36, 35)
    books.do("delete from outbox.sink")
    found = findings(books)
    assert "retention-idle" in found
    assert "retention-blocked" not in found
    books.do("update outbox.retention set clock_mark = now(), archive = true")
    assert "archive-missing" in findings(books)
    books.do("update outbox.retention set archive = false")
    assert "retention-late" in findings(books)


def test_a_day_that_has_just_passed_keep_days_is_no_finding(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 31, 31)
    books.do("delete from outbox.sink; update outbox.retention set clock_mark = now(), archive = true")
    [day] = [day for day in (books.store.retention_status(live=True))["days"] if day["due"]]
    assert 0 <= day["due_seconds"] < log.LATE_SECONDS
    assert (findings(books)).keys() == {"types-without-a-route"}


def test_shards_that_were_just_released_are_no_finding(books: Ledger) -> None:
    books.do("update outbox.shard set owner = null, released_at = clock_timestamp()")
    assert findings(books) == {}
    books.do("update outbox.shard set released_at = clock_timestamp() - interval '31 seconds'")
    assert (findings(books))["shards-unowned"].severity == "critical"


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


def test_a_prepared_transaction_is_rolled_back_by_its_statement(books: Ledger) -> None:
    for name in ("'prepared'", "'it''s'"):
        with books.database.connect(autocommit=True) as other:
            for statement in ("begin", "select pg_current_xact_id()", f"prepare transaction {name}"):
                other.execute(statement.encode())
    [long] = server.examine_transactions(books.store.named("doctor_transactions", {"seconds": 0.0}))
    assert long.statements == ["rollback prepared 'prepared'", "rollback prepared 'it''s'"]
    with books.database.connect(autocommit=True) as owner:
        for statement in long.statements:
            owner.execute(statement.encode())
        left = owner.execute("select gid from pg_prepared_xacts where database = current_database()").fetchall()
    assert left == []


def test_no_statement_ends_a_session_that_waits_itself(books: Ledger) -> None:
    """One that is ahead in the queue blocks too, and is no culprit."""
    with books.database.connect() as first:
        first.execute("lock table outbox.sink in access share mode")
        with waiting(books, first, "lock table outbox.sink in access exclusive mode", sessions=2):
            [wait] = server.examine_locks(waits_seen(books, sessions=2))
            assert [_pid(statement) for statement in wait.statements] == [first.info.backend_pid]


def test_a_wait_for_rows_is_found(books: Ledger) -> None:
    with books.database.connect() as first:
        first.execute("select from outbox.shard where shard = 7 for update")
        with waiting(books, first, "update outbox.shard set crashes = 0 where shard = 7"):
            [wait] = server.examine_locks(waits_seen(books))
            assert "for rows of outbox.shard" in wait.evidence
            assert f"blocked by {first.info.backend_pid}" in wait.evidence


def test_the_age_of_a_statement_is_not_its_wait_for_a_lock(books: Ledger) -> None:
    works_and_waits = "do $$ begin perform pg_sleep(3); lock table outbox.sink in exclusive mode; end $$"
    with books.database.connect() as first:
        first.execute("lock table outbox.sink in access share mode")
        first.execute("lock table outbox.sink in share mode")
        with waiting(books, first, works_and_waits):
            waits_seen(books)
            assert books.store.named("doctor_locks", {"seconds": 2.5}) == []


def test_vacuum_is_no_long_transaction(books: Ledger) -> None:
    books.emit(*"abcdefgh" * 200)
    [(table,)] = books.query("select tableoid::regclass::text from outbox.event limit 1")

    def vacuums() -> None:
        with suppress(psycopg.errors.QueryCanceled), books.database.connect(autocommit=True) as second:
            second.execute("set vacuum_cost_limit = 1")
            second.execute("set vacuum_cost_delay = '100ms'")
            second.execute(f"vacuum {table}".encode())

    thread = threading.Thread(target=vacuums)
    thread.start()
    try:

        def seen() -> list[Any]:
            return books.query("select pid from pg_stat_progress_vacuum where datname = current_database()")

        [(pid,)] = until(seen, seconds=20, what="VACUUM works")
        found = books.store.named("doctor_transactions", {"seconds": 0.0})
        assert books.query("select 1 from pg_stat_progress_vacuum where pid = %s", pid)
        assert not [each.who for each in found if f"pid {pid}," in each.who]
    finally:
        books.query("select pg_cancel_backend(pid) from pg_stat_progress_vacuum where datname = current_database()")
        thread.join(30)


@pytest.mark.slow
def test_days_are_found_while_positions_are_locked(books: Ledger) -> None:
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 36, 35)
    books.do(
        "insert into outbox.day (day, kept_by) values ((now() at time zone 'UTC')::date - 36, jsonb_build_array("
        " jsonb_build_object('kind', 'sink', 'name', 's', 'paused', false, 'shards', 64,"
        " 'since', '2026-11-01T00:00:00+00:00')))"
    )
    with books.database.connect() as other:
        other.execute("lock table outbox.progress in access exclusive mode")
        found = {each.id: each for each in doctor(books.store)}
    assert "kept by sink s with 64 shards" in found["retention-blocked"].evidence


def test_a_role_that_emits_without_waiting_for_the_disk_is_found(database: Database) -> None:
    with new_role(database, "emit") as emits, new_role(database, "read") as reads:
        for kind, role in ("emit", emits), ("read", reads):
            assert inside("migrate", f"--grant-{kind}", role, "--dsn", database.dsn).code == 0
            with database.connect(autocommit=True) as owner:
                owner.execute(f"alter role {role} set synchronous_commit = off".encode())
        ended = inside("doctor", "--json", "--dsn", database.dsn)
    [found] = [each for each in ended.json["findings"] if each["id"] == "synchronous-commit-off"]
    assert found["evidence"] == f"synchronous_commit is off for {emits}"


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


def test_dead_rows_are_found_under_their_table(books: Ledger) -> None:
    """PostgreSQL may lose any report: rows are added until enough arrive, and both counts are its own."""

    def counted() -> list[Any]:
        books.emit(*"abcdefgh")
        books.do("delete from outbox.event")
        books.database.close()  # reports what the connection has done
        return [row for row in books.store.named("doctor_tables", {"dead": 5}) if row.name == "event"]

    rows = until(counted, seconds=20, what="the dead rows are counted")
    [finding] = server.examine_tables(rows)
    assert f"dead: {rows[0].dead}, live: {rows[0].live}, last vacuum: " in finding.evidence


def test_a_replication_slot_is_found(books: Ledger) -> None:
    books.do("select pg_create_physical_replication_slot('forgotten', true)")
    books.emit("k")
    books.do("select pg_create_physical_replication_slot('newer', true)")
    try:
        found = list(server.examine_slots(books.store.named("doctor_slots", {"bytes": -1})))
        assert "forgotten keeps WAL" in next(each.summary for each in found if "forgotten" in each.summary)
        assert books.store.named("doctor_slots", {"bytes": 1 << 40}) == []
        order = [finding.summary.split()[2] for finding in found]
        assert order.index("forgotten") < order.index("newer"), "the largest come first"
        assert "select pg_drop_replication_slot('newer')" in [sql for each in found for sql in each.statements]
    finally:
        books.do("select pg_drop_replication_slot(slot_name) from pg_replication_slots where not active")


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


def test_a_careful_server_ends_with_0() -> None:
    with PostgresServer(fsync=True) as careful:
        careful.create_database("careful")
        migrate(careful.dsn("careful"))
        assert inside("doctor", "--json", "--dsn", careful.dsn("careful")).json == {"findings": []}
        ended = inside("doctor", "--dsn", careful.dsn("careful"))
        assert (ended.code, ended.out) == (0, "no problems found\n")


@pytest.mark.parametrize("kind", ["read", "relay"])
def test_a_role_is_told_what_it_may_not_see(database: Database, kind: str) -> None:
    with new_role(database, kind) as role:
        assert inside("migrate", f"--grant-{kind}", role, "--dsn", database.dsn).code == 0
        ended = inside("doctor", "--json", "--dsn", f"{database.dsn} user={role}")
        assert ended.err == ""
        found = {each["summary"]: each for each in ended.json["findings"] if each["id"] not in EXPECTED}
        unseen = {"long transactions of other roles: unknown"}
        if kind == "read":
            unseen |= {"not examined: relay configs", "not examined: foreign privileges"}
        assert found.keys() == unseen
        assert {each["severity"] for each in found.values()} == {"ok"}
        assert "password" not in json.dumps(found)


def test_a_database_without_the_schema_is_refused(empty_database: Database) -> None:
    ended = inside("doctor", "--dsn", empty_database.dsn)
    assert ended.code == 2
    assert "outbox-relay migrate" in ended.err
