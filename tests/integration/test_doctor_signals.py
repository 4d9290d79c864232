"""Signals of a queue that degrades, and what holds VACUUM back or costs disk: each is made, and found by `doctor`."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.admin.doctor import doctor, server
from outbox_relay.postgres import database as database_module
from outbox_relay.settings.effective import recorded
from tests.support.archives import run, write_config
from tests.support.command import inside
from tests.support.database import Database
from tests.support.days import date_ago, emit_ago, fill_days, keep
from tests.support.findings import a_served_sink, findings
from tests.support.ledger import Ledger
from tests.support.relay_harness import CountingStore
from tests.support.settings_file import FILE, load_text

SQL = Path(database_module.__file__).parent / "sql"


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one live relay that owns the shards of one sink, all at the end of the log."""
    with a_served_sink(database) as found:
        yield found


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
