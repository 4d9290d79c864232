"""The SQL that creates or upgrades the schema.

``debezium.sql`` is not a migration: it holds functions for users who come from Debezium, and they are created or
replaced each time they are requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg import sql

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.schema_versions import SCHEMA_FOLDER, Migration, migrations

LOCK_SECONDS: Final = 5
"""Longest wait for each lock that a migration needs."""
MIN_PAYLOAD_CEILING, MAX_PAYLOAD_CEILING = 1 << 10, 64 << 20
"""Limits of the payload ceiling, in bytes."""

DEBEZIUM: Final = "debezium.sql"
"""The file with the functions that adopt an outbox table of Debezium's."""


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """Optional parts: grants as (kind, role), the functions for Debezium, and the payload ceiling in bytes."""

    grants: tuple[tuple[str, str], ...]
    debezium: bool
    max_payload_bytes: int | None


def schema_options(
    grants: Mapping[str, Iterable[str]], *, debezium: bool, max_payload_bytes: int | None
) -> SchemaOptions:
    """Return the options with each role of a kind once. ``grants`` maps kinds to roles.

    Raises ``DatabaseUnusable`` for a ceiling outside its limits.
    """
    if max_payload_bytes is not None and not MIN_PAYLOAD_CEILING <= max_payload_bytes <= MAX_PAYLOAD_CEILING:
        raise DatabaseUnusable(
            f"the ceiling of payloads must be {MIN_PAYLOAD_CEILING} to {MAX_PAYLOAD_CEILING} bytes: {max_payload_bytes}"
        )
    pairs = tuple((kind, role) for kind, roles in grants.items() for role in dict.fromkeys(roles))
    return SchemaOptions(pairs, debezium, max_payload_bytes)


def script(
    grant_emit: Iterable[str] = (),
    grant_relay: Iterable[str] = (),
    *,
    grants: Mapping[str, Iterable[str]] | None = None,
    debezium: bool = False,
    max_payload_bytes: int | None = None,
    have: int = 0,
    folder: Path = SCHEMA_FOLDER,
) -> str:
    """Return the SQL that ``migrate`` runs on a schema of version ``have``, for use with other tools.

    ``grants`` maps further kinds, as in the view outbox.privilege, to roles. Run all of it in one transaction, as the
    role that is to own the schema.
    """
    roles = {"emit": grant_emit, "relay": grant_relay, **(grants or {})}
    options = schema_options(roles, debezium=debezium, max_payload_bytes=max_payload_bytes)
    steps = [step for step in migrations(folder) if step.version > have]
    ceiling = options.max_payload_bytes
    return "\n".join(
        (
            f"-- Schema outbox, from version {have} to {steps[-1].version if steps else have}.",
            "-- To be run in one transaction: psql -1 -v ON_ERROR_STOP=1 -f FILE, or a tool that does the same.",
            PROLOGUE,
            *(step_sql(step) for step in steps),
            *(grant_sql(kind, role) for kind, role in options.grants),
            *([] if ceiling is None else [ceiling_sql(ceiling)]),
            *([(folder / DEBEZIUM).read_text(encoding="utf-8")] if options.debezium else []),
            (folder / "grants.sql").read_text(encoding="utf-8"),
            _EPILOGUE,
        )
    )


# Names of functions and operators in a migration refer to those of the system, whatever the caller's search_path
# contains. The other settings decide what the statements create and how values are read, whatever their defaults. The
# epilogue restores all of them for later statements of the same transaction. The lock is on tables, because any role of
# the database could hold an advisory lock. Sinks are locked first, as in every change of both. Before the tables exist,
# sessions wait for each other in CREATE SCHEMA.
PROLOGUE: Final = f"""
do $$
declare
    setting text[];
begin
    foreach setting slice 1 in array array[
        ['search_path', 'outbox.search_path_before', 'pg_catalog, pg_temp'],
        ['lock_timeout', 'outbox.lock_timeout_before', '{LOCK_SECONDS}s'],
        ['standard_conforming_strings', 'outbox.standard_conforming_strings_before', 'on'],
        ['TimeZone', 'outbox.timezone_before', 'UTC'],
        ['DateStyle', 'outbox.datestyle_before', 'ISO'],
        ['default_tablespace', 'outbox.default_tablespace_before', ''],
        ['default_table_access_method', 'outbox.default_table_access_method_before', 'heap'],
        ['plpgsql.extra_errors', 'outbox.extra_errors_before', 'none'],
        ['plpgsql.extra_warnings', 'outbox.extra_warnings_before', 'none']
    ] loop
        perform pg_catalog.set_config(setting[2], pg_catalog.current_setting(setting[1]), true);
        perform pg_catalog.set_config(setting[1], setting[3], true);
    end loop;
    if getdatabaseencoding() <> 'UTF8' then
        raise exception 'this database has the encoding %, and schema outbox needs UTF8', getdatabaseencoding();
    end if;
    if to_regclass('outbox.meta') is not null then
        lock table outbox.sink, outbox.meta in share row exclusive mode;
    end if;
end
$$;
"""

_EPILOGUE: Final = """
do $$
declare
    setting text[];
begin
    foreach setting slice 1 in array array[
        ['lock_timeout', 'outbox.lock_timeout_before'],
        ['standard_conforming_strings', 'outbox.standard_conforming_strings_before'],
        ['TimeZone', 'outbox.timezone_before'],
        ['DateStyle', 'outbox.datestyle_before'],
        ['default_tablespace', 'outbox.default_tablespace_before'],
        ['default_table_access_method', 'outbox.default_table_access_method_before'],
        ['plpgsql.extra_errors', 'outbox.extra_errors_before'],
        ['plpgsql.extra_warnings', 'outbox.extra_warnings_before'],
        ['search_path', 'outbox.search_path_before']
    ] loop
        perform pg_catalog.set_config(setting[1], pg_catalog.current_setting(setting[2]), true);
    end loop;
end
$$;
"""

_GUARD: Final = """
do $$
declare
    have integer := 0;
begin
    if to_regclass('outbox.meta') is not null then
        have := (select m.schema_version from outbox.meta m);
    end if;
    if have <> {before} then
        raise exception 'schema outbox has version %, and this step goes from {before} to {after}', have
            using hint = 'Nothing was changed. Print the script for this version, or run outbox-relay migrate.';
    end if;
end
$$;
"""


def step_sql(step: Migration) -> str:
    """Return the SQL of a migration, which fails unless the schema has the version before it."""
    guard = _GUARD.format(before=step.version - 1, after=step.version)
    min_relay = f"greatest(min_relay, {step.min_relay})"
    done = f"update outbox.meta set schema_version = {step.version}, min_relay = {min_relay};\n"  # noqa: S608 - two numbers
    return f"-- {step.name}\n{guard}\n{step.text}\n{done}"


def grant_sql(kind: str, role: str) -> str:
    """Return the statement that records a grant. It fails with SQLSTATE 42704 if the role does not exist."""
    name = sql.Literal(sql.Identifier(role).as_string()).as_string()
    return (
        f"insert into outbox.grantee (role_name, kind) select r.rolname, '{kind}' from pg_roles r "  # noqa: S608 - quoted
        f"where r.oid = {name}::regrole on conflict do nothing;\n"
    )


def ceiling_sql(max_payload_bytes: int) -> str:
    """Return the statement that sets the payload ceiling."""
    return (
        "create or replace function outbox.payload_ceiling() returns integer "
        f"language sql stable parallel safe return {max_payload_bytes};\n"
    )
