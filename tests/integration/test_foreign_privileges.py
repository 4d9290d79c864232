"""Privileges that others gave are named, and revoked on request; strangers stop nothing; encodings that are refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_FOLDER, script
from outbox_relay.postgres.session_settings import CHECKED_SETTINGS, SESSION_SETTINGS
from outbox_relay.postgres.store import Store
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.roles import STATEMENTS, denied, new_role
from tests.support.schemas import next_schema


@pytest.fixture
def stranger(database: Database) -> Iterator[str]:
    """Yield a role that nothing was granted to."""
    with new_role(database, "stranger") as name:
        yield name


# -- default privileges and what was granted by hand ---------------------------------------------------------------

HOSTILE = (
    "alter default privileges {} grant all on tables to {}",
    "alter default privileges {} grant all on sequences to {}",
    "alter default privileges {} grant execute on functions to {}, public",
)
TRIED = (
    "select from outbox.event",
    "select payload from outbox.{day}",
    "select from outbox.event_default",
    "select * from outbox.standing",
    "select * from outbox.privilege",
    "select * from outbox.foreign_privilege",
    "insert into outbox.event (uid, type, content_type) values (gen_random_uuid(), 't', 'c')",
    "insert into outbox.{day} (xid, id, uid, type, content_type) values ('3', 1, gen_random_uuid(), 't', 'c')",
    "copy outbox.event (id, xid) from stdin",
    "copy outbox.event to stdout",
    "update outbox.event set payload = ''",
    "update outbox.{day} set payload = ''",
    "delete from outbox.event",
    "delete from outbox.{day}",
    "truncate outbox.{day}",
    "lock table outbox.{day} in access share mode",
    "create trigger t before insert on outbox.{day} for each row execute function suppress_redundant_updates_trigger()",
    "create table public_ref (id boolean references outbox.secret (single))",
    "alter table outbox.event detach partition outbox.{day}",
    "drop table outbox.{day}",
    "select * from outbox.delivery",
    "insert into outbox.delivery default values",
    "delete from outbox.progress",
    "update outbox.sink set paused = true",
    "update outbox.meta set min_relay = 9",
    "delete from outbox.uid",
    "insert into outbox.uid (uid, emitter) values (gen_random_uuid(), 'x')",
    "select from outbox.secret for update",
    "select nextval('outbox.event_id_seq')",
    "select setval('outbox.event_id_seq', 1)",
    "select last_value from outbox.event_id_seq",
    "select outbox.rebase()",
    "select outbox_internal.tick()",
    "select outbox_internal.make_partitions(9)",
    "select outbox_internal.claim_uid(gen_random_uuid(), 'x')",
    "select outbox_internal.payload_ceiling()",
    "select outbox_internal.read_rest(null, null, null, null, 0, 9, 9, 9)",
    "create or replace function outbox_internal.payload_ceiling() returns integer language sql return 1",
    "create table outbox.mine ()",
    "alter schema outbox rename to mine",
)


def hostile(database: Database, owner: str, role: str) -> None:
    """Let the owner grant everything that it makes from now on to a role."""
    with database.connect(user=owner, autocommit=True) as conn:
        for statement in HOSTILE:
            conn.execute(statement.format("", role).encode())
        if conn.execute("select to_regnamespace('outbox')::text").fetchone() != (None,):
            for schema in ("outbox", "outbox_internal"):
                for statement in HOSTILE:
                    conn.execute(statement.format(f"in schema {schema}", role).encode())


def newest_day(database: Database) -> str:
    """Return the partition of the last day that there is."""
    with database.connect() as conn:
        found = conn.execute(
            "select max(relname)::text from pg_class where relispartition and relname ~ '^event_[0-9]+$'"
        ).fetchone()
    assert found
    return found[0]


@pytest.fixture
def owned(postgres: PostgresServer, empty_database: Database) -> Iterator[str]:
    """Yield the owner of a database, who is no superuser and makes the schema."""
    with new_role(empty_database, "owner") as owner:
        with postgres.connect() as admin:
            admin.execute(f"alter database {empty_database.name} owner to {owner}".encode())
        yield owner
        with postgres.connect() as admin:
            admin.execute(f"alter database {empty_database.name} owner to postgres".encode())


@pytest.mark.parametrize("when", ["before", "between", "tomorrow"])
def test_default_privileges_give_nothing_away(empty_database: Database, owned: str, when: str) -> None:
    with new_role(empty_database, "app") as app, new_role(empty_database, "relay") as relay:
        if when == "before":
            hostile(empty_database, owned, app)
        found = migrate(empty_database.dsn_as(owned), grant_emit=[app], grant_relay=[relay])
        if when != "before":
            hostile(empty_database, owned, app)
        if when == "between":
            found = migrate(empty_database.dsn_as(owned))
        with empty_database.connect(user=relay, autocommit=True) as conn:
            conn.execute("set default_tablespace = 'pg_global'")
            conn.execute("set timezone = 'Asia/Kolkata'")
            conn.execute("set datestyle = 'SQL, DMY'")
            assert conn.execute("select outbox_internal.make_partitions(9)").fetchone() == (2,)
        default = f'default privileges of role "{owned}" give role "{app}" '
        assert any(note.startswith(default) for note in found.notes) == (when != "tomorrow")
        refused_to_an_application(empty_database, app)
        with empty_database.connect() as conn:
            assert conn.execute("select * from outbox.foreign_privilege").fetchall() == []
            bounds = conn.execute(
                "select pg_get_expr(relpartbound, oid) from pg_class where oid = %s::regclass",
                [f"outbox.{newest_day(empty_database)}"],
            ).fetchone()
            assert bounds
            assert re.search(r"FROM \('\S+ 00:00:00\+00'\) TO \('\S+ 00:00:00\+00'\)", bounds[0])


def refused_to_an_application(database: Database, app: str) -> None:
    """Assert that the application emits, and may do nothing else of ``TRIED``."""
    with database.connect(user=app) as conn:
        outbox.emit(conn, "t", 1, key="k", uid=uuid4())
    day = newest_day(database)
    for statement in TRIED:
        denied(database, app, statement.replace("{day}", day))


def test_what_was_granted_by_hand_is_named_and_revoked_on_request(
    database: Database, app: str, relay: str, stranger: str
) -> None:
    day = newest_day(database)
    with database.connect(autocommit=True) as admin:
        for statement in (
            f"grant usage on schema outbox to {stranger} with grant option",
            f"grant select on outbox.{day} to {stranger}",
            f"grant select (payload), update (payload) on outbox.event to {app}",
            f"grant execute on function outbox.emit_raw to {stranger}",
            f"grant execute on function outbox.emit_raw to {app} with grant option",
            "grant usage on sequence outbox.event_id_seq to public",
            f"grant insert on outbox.event to {relay}",
        ):
            admin.execute(statement.encode())
    assert said_of(database, stranger) == [
        f'role "{stranger}" has EXECUTE on function emit_raw: outbox-relay migrate --revoke-others revokes it',
        f'role "{stranger}" has SELECT on table {day}: outbox-relay migrate --revoke-others revokes it',
        f'role "{stranger}" has USAGE on schema outbox: outbox-relay migrate --revoke-others revokes it',
    ]
    assert len(said_of(database, "")) == 7
    kept = migrate(database.dsn)
    assert sorted(kept.notes) == sorted(said_of(database, ""))
    assert len(kept.notes) == 7
    with database.connect(user=stranger) as conn:
        conn.execute("select outbox.emit_raw('t', '1')")
        conn.execute(f"select from outbox.{day}".encode())
    found = migrate(database.dsn, revoke_others=True)
    assert {note for note in found.notes if stranger in note} == {
        f'revoked from role "{stranger}": EXECUTE on function emit_raw',
        f'revoked from role "{stranger}": SELECT on table {day}',
        f'revoked from role "{stranger}": USAGE on schema outbox',
    }
    assert "revoked from PUBLIC: USAGE on sequence event_id_seq" in found.notes
    assert f'revoked from role "{app}": SELECT (payload), UPDATE (payload) on table event' in found.notes
    assert said_of(database, "") == []
    denied(database, stranger, "select outbox.emit('t', '1')")
    denied(database, relay, "insert into outbox.event (uid, type, content_type) values (gen_random_uuid(), 't', 'c')")
    refused_to_an_application(database, app)
    assert migrate(database.dsn).notes == ()


def said_of(database: Database, role: str) -> list[str]:
    """Return the lines of `check --online` about a role, or about all."""
    text = (STATEMENTS / "foreign_privileges.sql").read_text(encoding="utf-8")
    with database.connect() as conn:
        return [said for (said,) in conn.execute(text.encode(), {}) if role in said]


def test_what_a_superuser_migrates_belongs_to_the_owner(empty_database: Database, owned: str, tmp_path: Path) -> None:
    """Functions of the owner could not use objects of another role, and every emit would fail."""
    with new_role(empty_database, "app") as app, new_role(empty_database, "relay") as relay:
        migrate(empty_database.dsn_as(owned))
        newer = next_schema(tmp_path / "schema")
        migrate(empty_database.dsn, grant_emit=[app], grant_relay=[relay], folder=newer)
        with empty_database.connect(user=app) as conn:
            outbox.emit(conn, "t", 1, uid=uuid4(), headers={"a": "b"})
        with empty_database.connect(user=relay) as conn:
            conn.execute("select outbox_internal.make_partitions(9)")
        with empty_database.connect() as conn:
            others = conn.execute(
                "select c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace"
                " where n.nspname = 'outbox' and c.relowner <> n.nspowner union all "
                "select p.proname::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
                " where n.nspname in ('outbox', 'outbox_internal') and p.proowner <> n.nspowner"
            ).fetchall()
            assert others == []


# -- positions, and locks that everybody may take --------------------------------------------------------------------


def test_positions_that_nothing_outranks_cannot_be_deleted(database: Database, relay: str) -> None:
    with database.connect(user=relay, autocommit=True) as conn:
        conn.execute(REGISTER)
        for statement in ("delete from outbox.progress", "delete from outbox.progress where 5 = any (shards)"):
            with pytest.raises(
                errors.RestrictViolation, match="64 shards would have no position, of sink s among others"
            ):
                conn.execute(statement.encode())
        conn.execute(
            "insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)"
            " select sink, shards, epochs, a_seq, a_snapshot, a_next, 1 from outbox.progress"
        )
        trim = (STATEMENTS / "trim_progress.sql").read_text(encoding="utf-8")
        assert conn.execute(trim.encode(), {"most": 5000}).fetchall() == [(1,)]
        assert conn.execute("select count(*) from outbox.progress").fetchone() == (1,)
    with database.connect() as owner:
        owner.execute("select outbox.rebase()")
        owner.execute("delete from outbox.progress")


REGISTER = """select outbox_internal.register_sinks('[{"name": "s", "patterns": ["*"]}]', 0, '3:3:', 3)"""


# -- the defaults of a relay's role --------------------------------------------------------------------------------


def test_a_relays_role_gets_the_settings_that_a_pooler_cannot_carry(database: Database) -> None:
    with new_role(database, "relay") as relay, database.connect(autocommit=True) as admin:
        admin.execute(f"alter role {relay} set timezone = 'Asia/Tokyo'".encode())
        admin.execute(f"alter role {relay} in database {database.name} set row_security = 'on'".encode())
        admin.execute(f"alter database {database.name} set default_transaction_isolation = 'serializable'".encode())
        assert migrate(database.dsn, grant_relay=[relay]).notes == ()
        found = migrate(database.dsn, role_settings=True)
        [note] = found.notes
        assert note.startswith(f'set for role "{relay}" in this database, where something else stood before (')
        for before in ("TimeZone = 'Asia/Tokyo'", "row_security = 'on'", "isolation = 'serializable'"):
            assert before in note.partition("): ")[0]
        with database.connect(user=relay) as conn:
            for name, value in (("timezone", "UTC"), ("row_security", "off"), ("search_path", "pg_catalog"),
                                ("transaction_isolation", "read committed")):  # fmt: skip
                assert conn.execute(f"show {name}".encode()).fetchone() == (value,)
        assert migrate(database.dsn, role_settings=True).notes == ()


def test_the_settings_are_those_of_the_relay() -> None:
    text = (SCHEMA_FOLDER / "role_settings.sql").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\['(\w+)', '([^']*)'\]", text))
    assert listed == {**SESSION_SETTINGS, **CHECKED_SETTINGS}


# -- encodings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_databases_of_other_encodings_are_refused(postgres: PostgresServer, encoding: str) -> None:
    name = f"test_{uuid4().hex}"
    with postgres.connect() as admin:
        admin.execute(f"create database {name} encoding '{encoding}' locale 'C' template template0".encode())
    database = Database(postgres, name)
    try:
        with pytest.raises(
            DatabaseUnusable, match=f"^this database has the encoding {encoding}, and the outbox needs UTF8: "
        ):
            migrate(database.dsn)
        with database.connect() as conn, pytest.raises(errors.RaiseException, match="schema outbox needs UTF8"):
            conn.execute(script().encode())
        with pytest.raises(
            DatabaseUnusable, match=f"^this database has the encoding {encoding}, and the outbox needs UTF8: "
        ):
            Store(lambda: database.dsn, pooler=False, connections=1).open()
    finally:
        postgres.drop_database(name)
