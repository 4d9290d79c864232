"""Findings of the whole `doctor` on the server and its sessions: each test causes a condition and sees it reported."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outbox_relay.admin.doctor import examination
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside, outbox_relay
from tests.support.database import Database
from tests.support.findings import a_served_sink, findings
from tests.support.ledger import Ledger
from tests.support.roles import new_role
from tests.support.shifted_clock import shifted
from tests.support.wait import until

LOWER = {
    "doctor_transactions": {"seconds": 0.0},
    "doctor_locks": {"seconds": 0.0},
    "doctor_tables": {"dead": 5},
    "doctor_slots": {"bytes": -1},
    "doctor_autovacuum": {"dead": 0, "seconds": 0.0},
}
"""Limits in place of five minutes, a second, many dead rows, 10 GiB and an hour."""
WAITS = "do $$ begin lock table outbox.sink in exclusive mode; end $$"
"""The smallest that the server accepts."""


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one live relay that owns the shards of one sink, all at the end of the log."""
    with a_served_sink(database) as found:
        yield found


def test_what_takes_long_or_becomes_large_is_found_by_the_whole_examination(
    books: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conditions are real; the limits are lower, since the product's take minutes, hours and gigabytes."""
    books.do("select pg_create_physical_replication_slot('examined', true)")

    def counted() -> Any:
        """Make dead rows in each look: PostgreSQL may lose any report of statistics."""
        with books.database.connect(autocommit=True) as ended:  # the end of a session makes its counts known
            ended.execute("insert into outbox.uid (uid) select gen_random_uuid() from generate_series(1, 300)")
            ended.execute("delete from outbox.uid")
        return books.store.named("doctor_autovacuum", LOWER["doctor_autovacuum"])

    until(counted, seconds=20, what="the dead rows are counted")
    made = {"long-transaction", "lock-waits", "dead-tuples", "replication-slot", "autovacuum-late"}
    assert not made & (findings(books)).keys(), "none of them is beyond the product's limits"
    lowered = [(name, LOWER.get(name, given), check) for name, given, check in examination.CHECKS]
    monkeypatch.setattr(examination, "CHECKS", lowered)
    try:
        with books.database.connect() as first, ThreadPoolExecutor() as threads:
            first.execute("lock table outbox.sink in share mode")
            waits = threads.submit(books.do, WAITS)

            def all_found() -> Any:
                return made <= (findings(books)).keys()

            until(all_found, seconds=20, what="all five are found")
            first.rollback()
            waits.result()
    finally:
        books.do("select pg_drop_replication_slot('examined')")


def test_a_clock_of_this_machine_that_is_wrong_is_found(database: Database) -> None:
    ended = outbox_relay("doctor", "--json", "--dsn", database.dsn, stdin=b"", **shifted(-20))
    [found] = [each for each in ended.json["findings"] if each["id"] == "clocks-apart"]
    assert found["severity"] == "warning"
    assert found["evidence"] in {"by 19.9 s", "by 20.0 s"}


WHOLE = "with (publish_via_partition_root = true)"
OF_PARTITIONS = {
    "for all tables": [],
    "for tables in schema outbox": [],
    "for table outbox.event": [],
    "for table outbox.event_default": ["alter publication p add table outbox.event"],
    f"for table outbox.event_default {WHOLE}": ["alter publication p add table outbox.event"],
}


def test_a_publication_of_partitions_is_named_and_its_statements_mend_it(database: Database) -> None:
    """A subscriber has no partition for tomorrow."""
    for whole in ("for all tables", "for table outbox.event", "for table outbox.sink"):
        database.run(f"create publication p {whole} {WHOLE if whole != 'for table outbox.sink' else ''}")
        assert _publications(database) == []
        database.run("drop publication p")
    for parts, added in OF_PARTITIONS.items():
        database.run(f"create publication p {parts}")
        [found] = _publications(database)
        assert "publication p " in found["summary"]
        assert found["statements"] == [*added, "alter publication p set (publish_via_partition_root = true)"]
        for statement in found["statements"]:
            database.run(statement)
        assert _publications(database) == []
        database.run("drop publication p")


def _publications(database: Database) -> list[dict[str, Any]]:
    found = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
    return [each for each in found if each["id"] == "publication-of-partitions"]


def test_what_a_role_may_not_see_is_unknown(database: Database) -> None:
    """Never "none": a transaction that it does not see may be open for hours."""
    with new_role(database, "watcher") as watcher, new_role(database, "other") as other:
        migrate(database.dsn, grants={"read": [watcher]})
        dsn = database.dsn_as(watcher)
        with database.connect(user=other) as session:
            session.execute("select 1")
            for command in (("doctor",), ("doctor", "--json")):
                ended = inside(*command, "--dsn", dsn)
                assert "long transactions of other roles: unknown" in ended.out
                assert f"grant pg_read_all_stats to {watcher}" in ended.out.replace('\\"', "").replace('"', "")
            assert "no problems found" not in inside("doctor", "--dsn", dsn).out
            database.run(f'grant pg_read_all_stats to "{watcher}"')
            assert "unknown" not in inside("doctor", "--dsn", dsn).out
