"""Signals of a queue that degrades, and what holds VACUUM back or costs disk: each is made, and found by `doctor`."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.admin.doctor import doctor, log, server
from outbox_relay.postgres import database as database_module
from outbox_relay.service.figures import Figures
from outbox_relay.settings.effective import recorded
from tests.support.archives import run, write_config
from tests.support.command import inside
from tests.support.database import Database
from tests.support.days import date_ago, emit_ago, fill_days, keep
from tests.support.findings import a_served_sink, findings
from tests.support.ledger import Ledger, ledger
from tests.support.logs import RecordedLog
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, running, spec
from tests.support.roles import new_role
from tests.support.settings_file import FILE, load_text
from tests.support.wait import until

MINUTES = """
insert into outbox.history (sink, at, delivered, claim_p99, tick_p99, settle_p99, busy_ms)
select %s, date_trunc('minute', now()) - n * interval '1 minute', %s, %s, %s, %s, %s
  from generate_series(%s::integer, %s::integer) n
    on conflict (sink, at) do nothing"""
"""Two statements may lie on both sides of a full minute."""
COPIES = """
insert into outbox.history
select (jsonb_populate_record(h, jsonb_build_object('at', date_trunc('minute', now()) - n * interval '1 minute'))).*
  from outbox.history h, generate_series(%s::integer, %s::integer) n
 where h.at > now() - interval '2 minutes'
    on conflict (sink, at) do nothing"""
WAITED = """
select 1 from pg_locks
 where not granted and relation = %s::regclass and clock_timestamp() - waitstart > interval '0.3 s'"""
RECENT, EARLIER = (1, 15), (16, 90)
"""Minutes ago."""
SQL = Path(database_module.__file__).parent / "sql"
LIVED = "update outbox.relay set started_at = now() - interval '1 hour'"


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one live relay that owns the shards of one sink, all at the end of the log."""
    with a_served_sink(database) as found:
        yield found


def add(books: Ledger, minutes: tuple[int, int], sink: str = "s", **values: float) -> None:
    """Add minutes of a sink to the history."""
    columns = ("delivered", "claim_p99", "tick_p99", "settle_p99", "busy_ms")
    given = [values.get(name, 0 if name == "delivered" else None) for name in columns]
    books.do(MINUTES, sink, *given, *minutes)


@pytest.mark.parametrize(
    ("sink", "column", "evidence"),
    [
        ("", "tick_p99", "tick: 400 ms (before: 4 ms)"),
        ("s", "claim_p99", "claim of sink s: 400 ms (before: 4 ms)"),
        ("s", "settle_p99", "settle of sink s: 400 ms (before: 4 ms)"),
    ],
)
def test_statements_that_become_slower_are_found(books: Ledger, sink: str, column: str, evidence: str) -> None:
    add(books, EARLIER, sink, **{column: 0.004})
    add(books, (1, 6), sink, **{column: 0.4})
    add(books, (7, 15), sink, **{column: 0.004})
    add(books, (0, 0), sink, **{column: 300.0})
    assert findings(books) == {}, "most minutes are as before, and the present one does not count"
    books.do(f"update outbox.history set {column} = 0.4 where at > now() - interval '10 minutes'")
    found = findings(books)
    assert found.keys() == {"statements-slower"}
    assert found["statements-slower"].evidence.startswith(evidence)


def test_a_database_that_works_more_for_as_many_events_is_found(books: Ledger) -> None:
    for sink in ("", "s"):
        add(books, EARLIER, sink, delivered=500, busy_ms=1_500.0)
        add(books, RECENT, sink, delivered=500, busy_ms=4_500.0)
    found = findings(books)
    assert found.keys() == {"database-busy"}
    assert found["database-busy"].evidence == (
        "statements take 9.0 s in each minute, before 3.0 s; events delivered in each minute: 1000, before 1000"
    )
    books.do("update outbox.history set delivered = 2000 where at > now() - interval '15 minutes 30 seconds'")
    assert findings(books) == {}, "more events are delivered"


def test_a_short_history_is_not_judged(books: Ledger) -> None:
    add(books, (16, 73), tick_p99=0.001, busy_ms=1.0)
    add(books, RECENT, tick_p99=9.0, busy_ms=50_000.0)
    assert findings(books) == {}
    add(books, (74, 76), tick_p99=0.001, busy_ms=1.0)
    assert (findings(books)).keys() == {"statements-slower", "database-busy"}


def test_a_history_that_is_not_written_is_found(books: Ledger) -> None:
    books.do(LIVED)
    found = findings(books)
    assert (found.keys(), found["history-missing"].severity) == ({"history-missing"}, "ok")
    add(books, (5, 5))
    assert findings(books) == {}


def test_a_role_without_a_right_to_the_history_is_told_so(database: Database) -> None:
    with new_role(database, "read") as role:
        assert inside("migrate", "--grant-read", role, "--dsn", database.dsn).code == 0
        with database.connect(autocommit=True) as owner:
            owner.execute(f"revoke select on outbox.history from {role}".encode())
        said = inside("doctor", "--json", "--dsn", f"{database.dsn} user={role}").json["findings"]
    assert {"not examined: history", "not examined: minutes"} <= {finding["summary"] for finding in said}


def test_figures_that_a_relay_has_no_right_to_are_found(database: Database) -> None:
    with new_role(database, "relay") as role:
        assert inside("migrate", "--grant-relay", role, "--dsn", database.dsn).code == 0
        store = CountingStore(f"{database.dsn} user={role}")
        store.open()
        Figures(store, uuid4(), RecordedLog()).round()
        store.close()
        with ledger(database) as books:
            found = findings(books)
            assert (found.keys(), found["figures-unknown"].severity) == ({"figures-unknown"}, "ok")
            assert found["figures-unknown"].evidence == "groups: transactions"
            assert "pg_read_all_stats" in found["figures-unknown"].advice
            for odd in ('{"entries": 7}', '{"entries": [7, {"failed": true}, {"group": {}, "failed": false}]}', "[]"):
                books.do("update outbox.figures set figures = %s, at = now()", odd)
                assert findings(books) == {}


def test_a_statement_of_a_relay_that_waits_for_a_lock_is_found(database: Database) -> None:
    """Its own limit ends the wait after 5 s."""
    with running(database.dsn, (spec("s"), MemorySink())) as harness, ledger(database) as books:
        harness.owns_all()
        with database.connect() as other:
            other.execute("lock table outbox.progress in share mode")
            books.emit("k")

            def seen() -> list[Any]:
                return books.store.named("doctor_locks", {"seconds": server.LOCK_SECONDS})

            [wait] = server.examine_locks(until(seen, seconds=20, what="the wait is seen"))
            assert f"blocked by {other.info.backend_pid}" in wait.evidence
        harness.settled()


def test_a_transaction_is_found_with_the_dead_rows_that_it_keeps(books: Ledger) -> None:
    with books.database.connect() as first, books.database.connect() as second:
        first.execute("set transaction isolation level repeatable read")
        first.execute("select 1 from outbox.event")
        second.execute("lock table outbox.uid in access share mode")
        for _ in range(5):
            books.do("update outbox.shard set crashes = 0 where shard = 7")
        rows = books.store.named("doctor_transactions", {"seconds": 0.0})
        pids = [f"{each.info.backend_pid}," for each in (first, second)]
        [keeps, none] = [row.held for pid in pids for row in rows if row.who.split()[1] == pid]
        assert none is None
        assert keeps >= 5
        [finding] = server.examine_transactions(rows)
    assert f"keeps what the last {keeps} transactions" in finding.evidence
    assert "holds only its locks; " in finding.evidence


def test_a_table_without_autovacuum_is_found(books: Ledger) -> None:
    books.do("alter table outbox.uid set (autovacuum_enabled = off)")
    found = (findings(books))["autovacuum-off"]
    assert (found.severity, found.evidence) == ("warning", "autovacuum_enabled is off for uid")


def test_a_table_that_autovacuum_does_not_visit_is_found(books: Ledger) -> None:
    """PostgreSQL may lose any report of statistics: each look makes dead rows again."""

    def late() -> list[Any]:
        with books.database.connect(autocommit=True) as ended:  # the end of a session makes its counts known
            ended.execute("insert into outbox.uid (uid) select gen_random_uuid() from generate_series(1, 300)")
            ended.execute("delete from outbox.uid")
        return [row for row in books.store.named("doctor_autovacuum", parameters) if row.name == "uid"]

    parameters = {"dead": 0, "seconds": 0.0}
    rows = until(late, seconds=20, what="the dead rows are counted")
    [finding] = server.examine_autovacuum(rows)
    assert finding.id == "autovacuum-late"
    assert rows[0].dead >= 300
    assert f"uid: {rows[0].dead} dead rows, last visit: " in finding.evidence
    assert not books.store.named("doctor_autovacuum", {"dead": 1_000_000, "seconds": 0.0})
    books.do("vacuum outbox.uid")


def test_a_sink_that_no_relay_lists_is_found(books: Ledger) -> None:
    books.live("relay-1", "another")
    books.do("update outbox.session set lease_until = now() - interval '1 minute'")
    found = findings(books)
    assert found.keys() == {"sink-unserved"}
    assert found["sink-unserved"].severity == "critical"


def test_a_topic_in_trouble_is_found_while_its_sink_delivers(books: Ledger) -> None:
    ids = books.emit("a", "b", "c")
    books.catch_up("s")
    books.park("s", *(books.row(each) for each in ids))
    books.do("update outbox.delivery set last_error = 'topic shop.x: UNKNOWN_TOPIC_OR_PART' where id <> %s", ids[2])
    found = findings(books)
    assert found["topics-in-trouble"].evidence == "topic shop.x: UNKNOWN_TOPIC_OR_PART (2 rows)"
    books.do("update outbox.sink set circuit = 'open', circuit_since = now()")
    assert "topics-in-trouble" not in findings(books), "the whole destination is down"


def test_a_relay_behind_a_pooler_that_polls_is_found(books: Ledger, tmp_path: Path) -> None:
    key = books.store.config_key()
    for line, wanted in (("", ["pooler-without-listen"]), ('listen_dsn = "postgresql://relay@db/shop"', [])):
        text = FILE.replace("[database]", f'[database]\npooler = "transaction"\n{line}')
        config = json.dumps(recorded(load_text(tmp_path, text), key))
        books.store.record_config(books.relay, config)
        assert list(findings(books)) == wanted


def test_growth_of_the_log_is_found(books: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are smaller than those of the product, and the days too."""
    with books.database.connect(autocommit=True) as owner:
        fill_days(owner, 2, 1)
    assert "log-growth" not in findings(books)
    monkeypatch.setattr(log, "MOST_GROWTH", 1)
    monkeypatch.setattr(log, "MOST_DAILY", 1)
    assert "when its days reach keep_days (30)" in (findings(books))["log-growth"].evidence
    books.do("update outbox.retention set keep_days = 0")
    assert (findings(books))["log-growth"].advice == "set [retention] keep_days"


def test_every_statement_of_doctor_is_asked(database: Database) -> None:
    """The last one is asked for sinks in trouble only."""
    store = CountingStore(database.dsn)
    store.open()
    with database.connect(autocommit=True) as owner:
        owner.execute("insert into outbox.sink (name, patterns, start, circuit) values ('s', '{*}', 'now', 'open')")
        owner.execute("select outbox.emit('a.b', '{}')")
    doctor(store)
    store.close()
    assert {path.stem for path in SQL.glob("doctor_*.sql")} <= store.calls.keys()


def test_an_archive_that_fails_is_found_at_once(database: Database, tmp_path: Path) -> None:
    with database.connect(autocommit=True) as owner:
        fill_days(owner, 31, 31)
        emit_ago(owner, 0)
        keep(owner, 30, archive=True)
    (tmp_path / "file").write_text("")
    assert run(write_config(database, tmp_path, str(tmp_path / "file" / "archive"))).code == 1
    said = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
    [found] = [finding for finding in said if finding["id"] == "archive-missing"]
    assert date_ago(31) in found["evidence"]
    assert "was not written" in found["evidence"]
