"""Unusual databases: publications, settings of functions, and clocks that were set back."""

from __future__ import annotations

import pytest

from tests.support.chores import doing
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.days import date_ago, emit_ago, fill_days, keep, one, retention
from tests.support.ledger import ledger
from tests.support.sink_actions import register
from tests.support.wait import until

HOUR_AHEAD = "clock_timestamp() + interval '1 hour 5 minutes'"


@pytest.mark.parametrize("checks", ["all", "shadowed_variables,strict_multi_assignment,too_many_rows"])
def test_the_schema_is_made_where_functions_are_checked_for_development(empty_database: Database, checks: str) -> None:
    name = empty_database.name
    for setting in ("plpgsql.extra_errors", "plpgsql.extra_warnings"):
        query(empty_database, f"alter database {name} set {setting} = '{checks}'")
    ended = inside("migrate", "--dsn", empty_database.dsn)
    assert (ended.code, "shadows" in ended.err) == (0, False), ended.err
    [(uid,)] = query(empty_database, "select outbox.emit('job', '1')")
    assert uid


def test_a_day_that_cannot_be_emptied_stops_no_other(database: Database) -> None:
    """Goes red when one table that refuses deletes, or belongs to another role, keeps every other day and mark."""
    with database.connect(autocommit=True) as owner:
        fill_days(owner, 40, 38)
        emit_ago(owner, 20, 2)
        emit_ago(owner, 0)
        keep(owner, 10, keep_uids_days=10)
        owner.execute("insert into outbox.uid (uid, created_at) values (gen_random_uuid(), now() - interval '99 days')")
        owner.execute("create publication everything for all tables")
        ended = retention(database, "run", "--json")
        assert ended.code == 1, "a person has to look"
        assert ended.json["emptied"] == [date_ago(40), date_ago(39), date_ago(38)]
        assert "publishes deletes" in ended.json["kept"]["default"]
        assert one(owner, "select count(*) from outbox.uid") == 0
        assert "publishes deletes" in one(owner, "select left_because from outbox.day where day = '-infinity'")


# -- clocks that were set back ------------------------------------------------------------------------------------


def test_what_was_written_while_the_clock_was_ahead_does_not_last(database: Database) -> None:
    """Goes red when shards have no relay, and emits are merged into jobs that are done, for as long as it was ahead."""
    with ledger(database) as books:
        register(database, "jobs", "*")
        query(database, "select outbox.emit('job', '1', unique_key => 'done')")
        query(database, "update outbox.sink set created_at = now() + interval '1 day' returning 1")  # passes it by
        query(database, f"update outbox.unique_key set look_at = {HOUR_AHEAD} returning 1")
        query(database, f"update outbox.shard set released_at = {HOUR_AHEAD} returning 1")
        query(database, f"insert into outbox.session values ('jobs', gen_random_uuid(), {HOUR_AHEAD}) returning 1")
        query(
            database,
            "insert into outbox.relay (id, name, version, sinks, seen_at)"
            f" values (gen_random_uuid(), 'ghost', '0', '{{jobs}}', {HOUR_AHEAD}) returning 1",
        )

        def mended() -> bool:
            return query(
                database,
                "select (select count(*) from outbox.shard where released_at > clock_timestamp())"
                " + (select count(*) from outbox.session where lease_until > now() + interval '11 minutes'),"
                " (select count(*) from outbox.unique_key),"
                " (select count(*) from outbox.relay where seen_at > clock_timestamp())",
            ) == [(0, 0, 0)]

        with doing(books.store):
            until(mended, seconds=30, what="shards, keys and relays are as the clock says")
