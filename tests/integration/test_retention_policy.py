"""The policy of the retention: the roles that may change it, and the time at which a lower value counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
from psycopg import errors

from outbox_relay.admin.render_retention import NO_FILE
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.days import Connection, begin, emit_ago, fill_days, one, register, relay_says, retention, said
from tests.support.roles import new_role


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


def asks(connection: Connection, who: UUID, days: int) -> int:
    """Return the keep_days in force after a pass, with one live relay that asks for that number."""
    connection.execute("delete from outbox.relay")
    relay_says(connection, said(days))
    begin(connection, who)
    return one(connection, "select keep_days from outbox.retention")


def wait_for(connection: Connection, hours: int) -> None:
    """Let the policy have been asked for so long."""
    connection.execute("update outbox.retention set lower_since = lower_since - %s * interval '1 hour'", (hours,))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        "x",
        [],
        {**said(7), "keep_days": -1},
        {**said(7), "keep_dead_days": -1},
        {**said(7), "keep_uids_days": 1e9},
        {**said(7), "keep_days": 36501},
        {**said(7), "keep_days": 1.5},
        {**said(7), "keep_days": "7"},
        {**said(7), "keep_days": None},
        {**said(7), "archive": 1},
    ],
)
def test_a_policy_that_no_file_can_hold_is_refused(owner: Connection, wrong: object) -> None:
    relay_says(owner, None)
    with pytest.raises(errors.CheckViolation):
        owner.execute("update outbox.relay set retention = %s", (json.dumps(wrong),))
    assert owner.execute("update outbox.relay set retention = %s", (json.dumps(said(36_500)),)).rowcount == 1
    assert owner.execute("update outbox.relay set retention = null").rowcount == 1


def test_a_relay_cannot_lower_the_policy_at_once(database: Database, owner: Connection) -> None:
    with new_role(database, "relay") as relay, new_role(database, "operate") as operate:
        migrate(database.dsn, grant_relay=[relay], grants={"operate": [operate]})
        relay_says(owner, None)
        with database.connect(user=relay, autocommit=True) as connection:
            for statement in (
                "select * from outbox_internal.begin_retention(gen_random_uuid(), 't', 60, true)",
                "update outbox.relay set retention = '{}'",
                "insert into outbox.relay (id, name, version, sinks, retention)"
                " values (gen_random_uuid(), 'r', '1', '{}', '{}')",
            ):
                with pytest.raises((errors.InsufficientPrivilege, errors.CheckViolation)):
                    connection.execute(statement.encode())
            assert (
                one(connection, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 't', 60)")
                is not None
            )
        owner.execute("update outbox.retention set owner = null")
        with database.connect(user=operate, autocommit=True) as connection:
            assert (
                one(connection, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 't', 60, true)")
                is not None
            )


@pytest.mark.parametrize("name", ["keep_days", "keep_uids_days"])
def test_the_first_file_of_a_new_database_waits_a_day_if_it_would_empty_something_at_once(
    owner: Connection, name: str
) -> None:
    """Goes red when a first file counts at once, whatever the log holds."""
    me = uuid4()
    fill_days(owner, 12, 12)
    relay_says(owner, {**said(30), name: 7})
    begin(owner, me)
    assert one(owner, f"select {name} from outbox.retention") == 30
    wait_for(owner, 25)
    begin(owner, me)
    assert one(owner, f"select {name} from outbox.retention") == 7


def test_the_first_file_of_a_new_database_counts_at_once_if_it_would_empty_nothing(owner: Connection) -> None:
    fill_days(owner, 12, 12)
    assert asks(owner, uuid4(), 14) == 14


def test_a_pass_that_finds_no_day_names_the_relays_that_decide_keep_days(database: Database, owner: Connection) -> None:
    """Goes red when the operator has to look for the file that has the larger value."""
    fill_days(owner, 12, 12)
    emit_ago(owner, 0)
    for name, words in (("web-1", said(30)), ("web-2", said(7)), ("web-3", said(30))):
        relay_says(owner, words)
        owner.execute("update outbox.relay set name = %s where name = 'r'", (name,))
    plain = "no day is past keep_days, 30: the largest value of the live relays, that of web-1, web-3\n"
    assert retention(database, "run").out == plain
    assert retention(database, "run", "--dry-run").out == plain
    found = retention(database, "run", "--json").json
    assert (found["keep_days"], found["keep_days_of"]) == (30, ["web-1", "web-3"])
    owner.execute("delete from outbox.relay")
    assert retention(database, "run").out == f"no day is past keep_days, 30: {NO_FILE}\n"


def test_a_value_that_becomes_less_waits_for_a_day_of_its_own(owner: Connection) -> None:
    me = uuid4()
    assert asks(owner, me, 365) == 365
    assert asks(owner, me, 364) == 365
    wait_for(owner, 25)
    assert asks(owner, me, 7) == 365
    wait_for(owner, 23)
    assert asks(owner, me, 30) == 365
    wait_for(owner, 2)
    assert asks(owner, me, 30) == 30
    changes = owner.execute("select filter ->> 'keep_days', actor from outbox.audit where action = 'retention policy'")
    assert changes.fetchall()[-1] == ("30", "test")
    assert asks(owner, me, 365) == 365
    assert one(owner, "select count(*) from outbox.audit where filter ->> 'keep_days' = '364'") == 0


@pytest.mark.parametrize("without", ["relays", "passes"])
def test_a_time_without_relays_or_passes_does_not_count(owner: Connection, without: str) -> None:
    me = uuid4()
    asks(owner, me, 365)
    asks(owner, me, 7)
    wait_for(owner, 25)
    if without == "relays":
        owner.execute("delete from outbox.relay")
        begin(owner, me)
    else:
        owner.execute("update outbox.retention set clock_mark = clock_mark - interval '2 hours'")
    assert asks(owner, me, 7) == 365


def test_an_actor_is_cut_to_the_bytes_that_the_audit_takes(owner: Connection) -> None:
    actor = "ü" * 200 + "🙂" * 60
    owner.execute("select outbox_internal.begin_retention(gen_random_uuid(), %s, 60)", (actor,))
    assert one(owner, "select actor from outbox.retention") == "ü" * 127
    assert (
        one(owner, "select outbox_internal.record_action('x', null, null, 0, actor, null) from outbox.retention") == 1
    )


def test_the_audit_of_a_pause_keeps_its_whole_reason(owner: Connection) -> None:
    register(owner, "crm", "now")
    for reason in ("x" * 2000, "🙂" * 500):
        owner.execute("select outbox.set_paused('crm', true, null, %s)", (reason,))
        assert one(owner, "select reason from outbox.audit order by id desc limit 1") == reason
        owner.execute("select outbox.set_paused('crm', false)")
