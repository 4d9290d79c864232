"""The versions of the schema, and the SQL that creates or upgrades it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack, cast

from outbox_relay.domain.errors import DatabaseUnusable

BASELINE: Final = 34
"""The first version. Databases with an older one were made before the first release, and are refused."""

_FILE = re.compile(r"(\d{4})_\w+\.sql")
_MIN_RELAY = re.compile(r"^-- min_relay: (\d+)$", re.MULTILINE)
_PACKAGE = Path(__file__).parent.parent
_INSTALLED = _PACKAGE / "schema"
SCHEMA_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "schema"
"""Inside the package if it was installed from a wheel, next to it in a checkout."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its version, name and SQL, and the oldest schema whose relays still work."""

    version: int
    name: str
    min_relay: int
    text: str


def migrations(folder: Path) -> tuple[Migration, ...]:
    """Return the migrations of a schema folder, in order. Raise ``DatabaseUnusable`` if one is missing."""
    found: list[Migration] = []
    for path in _files(folder):
        text = path.read_text(encoding="utf-8")
        declared = _MIN_RELAY.search(text)
        min_relay = int(declared[1]) if declared else found[-1].min_relay if found else BASELINE
        found.append(Migration(_version(path), path.stem, min_relay, text))
    return tuple(found)


def _files(folder: Path) -> list[Path]:
    if not (folder / "tables").is_dir():
        raise DatabaseUnusable(f"{folder} does not hold the schema: install outbox-relay again")
    files = sorted(path for path in (folder / "migrations").glob("*.sql") if _FILE.fullmatch(path.name))
    if [_version(path) for path in files] != list(range(BASELINE + 1, BASELINE + 1 + len(files))):
        raise DatabaseUnusable(
            f"{folder} does not have every migration from {BASELINE + 1:04} on: install outbox-relay again"
        )
    return files


def _version(file: Path) -> int:
    return int(file.name[:4])


def newest_version(folder: Path) -> int:
    """Return the version that a schema folder defines."""
    return BASELINE + len(_files(folder))


SCHEMA_VERSION: Final = newest_version(SCHEMA_FOLDER)
"""The newest schema version in this package, for which its relay is made."""


def fit(schema_version: int | None, min_relay: int | None, *, ours: int = SCHEMA_VERSION) -> str | None:
    """Return why a relay made for schema ``ours`` cannot work on this one (None: no schema); None if it can."""
    if not schema_version:
        return "schema outbox is missing: run outbox-relay migrate"
    if schema_version < ours:
        return f"schema outbox has version {schema_version} and this relay needs {ours}: run outbox-relay migrate"
    if min_relay is not None and min_relay > ours:
        return (
            f"schema outbox has version {schema_version}, which needs relays made for version {min_relay} or newer; "
            f"this one is made for {ours}: install a newer outbox-relay"
        )
    return None


LOCK_SECONDS: Final = 5
"""Longest wait for each lock that a migration needs."""
MIN_PAYLOAD_CEILING, MAX_PAYLOAD_CEILING = 1 << 10, 64 << 20
"""Limits of the payload ceiling, in bytes."""


class Options(TypedDict, total=False):
    """Optional parts of ``migrate`` and ``script``, which all have a default.

    ``grant_emit``, ``grant_relay`` and ``grants`` (kind, as in the view outbox.privilege, → roles) name roles that get
    what they need. ``debezium`` adds the functions that adopt an outbox table of Debezium's. ``max_payload_bytes`` sets
    the payload ceiling. ``revoke_others`` revokes all privileges that the schema did not give. ``role_settings`` stores
    the settings that relays need behind a pooler as defaults of their roles in this database.
    """

    grant_emit: Iterable[str]
    grant_relay: Iterable[str]
    grants: Mapping[str, Iterable[str]]
    debezium: bool
    max_payload_bytes: int | None
    revoke_others: bool
    role_settings: bool


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """The options, with the pairs of kind and role of ``grants``."""

    grants: tuple[tuple[str, str], ...] = ()
    debezium: bool = False
    max_payload_bytes: int | None = None
    revoke_others: bool = False
    role_settings: bool = False


def schema_options(**given: Unpack[Options]) -> SchemaOptions:
    """Return the options with each role of a kind once. Raises ``DatabaseUnusable`` for a ceiling out of limits."""
    ceiling = given.get("max_payload_bytes")
    if ceiling is not None and not MIN_PAYLOAD_CEILING <= ceiling <= MAX_PAYLOAD_CEILING:
        raise DatabaseUnusable(
            f"the ceiling of payloads must be {MIN_PAYLOAD_CEILING} to {MAX_PAYLOAD_CEILING} bytes: {ceiling}"
        )
    roles = {"emit": given.pop("grant_emit", ()), "relay": given.pop("grant_relay", ()), **given.pop("grants", {})}
    pairs = tuple((kind, role) for kind, names in roles.items() for role in dict.fromkeys(names))
    return SchemaOptions(pairs, **cast(Any, given))


def script(*, have: int = 0, folder: Path = SCHEMA_FOLDER, **given: Unpack[Options]) -> str:
    """Return the SQL that ``migrate`` runs on a schema of version ``have``, for use with other tools.

    Run all of it in one transaction, as the role that is to own the schema.
    """
    return "\n".join(
        (
            f"-- Schema outbox, from version {have} to {max(have, newest_version(folder))}.",
            "-- To be run in one transaction: psql -1 -v ON_ERROR_STOP=1 -f FILE, or a tool that does the same.",
            PROLOGUE,
            *upgrade_sql(have, folder),
            *options_sql(schema_options(**given), folder),
            _EPILOGUE,
        )
    )


def upgrade_sql(have: int, folder: Path) -> list[str]:
    """Return the statements that bring a schema of version ``have`` to the newest one, [] if it is that.

    Raises ``DatabaseUnusable`` for a version that was never released.
    """
    if 0 < have < BASELINE:
        raise DatabaseUnusable(f"schema outbox has version {have}, which was never released: drop it, and run migrate")
    if have >= newest_version(folder):
        return []
    first = [_text(path) for path in sorted((folder / "tables").glob("*.sql"))]
    steps = [step_sql(step) for step in migrations(folder) if step.version > have]
    definitions = [*sorted((folder / "functions").glob("*.sql")), folder / "views.sql", folder / "triggers.sql"]
    return [
        *([_guard(have, newest_version(folder)), *steps] if have else [*first, _version_sql(folder)]),
        *(_text(path) for path in definitions),
        _NO_LONGER_DEFINED,
        *([] if have else [_FIRST]),
    ]


def options_sql(options: SchemaOptions, folder: Path) -> list[str]:
    """Return the statements of the last part: grants, payload ceiling, functions for Debezium, settings of roles."""
    revoke_others = "on" if options.revoke_others else "off"
    ceiling = f"update outbox.meta set max_payload_bytes = {options.max_payload_bytes};\n"  # noqa: S608 - a number
    return [
        *(_grant_sql(kind, role) for kind, role in options.grants),
        *([ceiling] if options.max_payload_bytes else []),
        *([_text(folder / "debezium.sql")] if options.debezium else []),
        f"set local outbox.revoke_others = {revoke_others};\n",
        _text(folder / "grants.sql"),
        *([_text(folder / "role_settings.sql")] if options.role_settings else []),
    ]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _version_sql(folder: Path) -> str:
    """Return the statement that gives a new schema its version."""
    steps = migrations(folder)
    version, min_relay = (steps[-1].version, steps[-1].min_relay) if steps else (BASELINE, BASELINE)
    return f"insert into outbox.meta (schema_version, min_relay) values ({version}, {min_relay});\n"  # noqa: S608 - numbers


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
        ['check_function_bodies', 'outbox.check_function_bodies_before', 'off'],
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
    perform set_config('outbox.there_before', array(
        select case when c.relkind = 'S' then 'sequence ' else 'table ' end || c.oid
          from pg_class c where c.relnamespace = to_regnamespace('outbox')
        union all
        select 'function ' || p.oid from pg_proc p
         where p.pronamespace in (to_regnamespace('outbox'), to_regnamespace('outbox_internal'))
        union all
        select 'schema ' || n.oid from pg_namespace n where n.nspname in ('outbox', 'outbox_internal'))::text, true);
end
$$;
"""  # noqa: S608 - a number

_EPILOGUE: Final = """
do $$
declare
    setting text[];
begin
    foreach setting slice 1 in array array[
        ['lock_timeout', 'outbox.lock_timeout_before'],
        ['check_function_bodies', 'outbox.check_function_bodies_before'],
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


def _guard(before: int, after: int) -> str:
    """Return a statement that fails unless the schema has the version ``before``."""
    return f"""
do $$
declare
    have integer := 0;
begin
    if to_regclass('outbox.meta') is not null then
        have := (select m.schema_version from outbox.meta m);
    end if;
    if have <> {before} then
        raise exception 'schema outbox has version %, and this script goes from {before} to {after}', have
            using hint = 'Nothing was changed. Print the script for this version, or run outbox-relay migrate.';
    end if;
end
$$;
"""  # noqa: S608 - two numbers


# Every definition of the files was just created or replaced by this transaction, so that what is older is defined no
# more. All of it goes in one statement, as its parts may depend on each other. Triggers of others' functions, and the
# functions of debezium.sql, are left alone.
_NO_LONGER_DEFINED: Final = """
do $$
declare
    functions text;
    item record;
begin
    for item in
        select t.tgname as name, t.tgrelid::regclass::text as of_table
          from pg_trigger t
          join pg_proc p on p.oid = t.tgfoid and p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])
          join pg_class c on c.oid = t.tgrelid and c.relnamespace = 'outbox'::regnamespace
         where not t.tgisinternal and t.tgparentid = 0 and age(t.xmin) > 0
    loop
        execute format('drop trigger %I on %s', item.name, item.of_table);
    end loop;
    select string_agg(p.oid::regprocedure::text, ', ') into functions
      from pg_proc p
     where p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[]) and age(p.xmin) > 0
       and p.proname !~ 'debezium';
    if functions is not null then
        execute 'drop function ' || functions;
    end if;
end
$$;
"""

# What a new schema needs once its functions are there.
_FIRST: Final = """
select outbox_internal.arm(), outbox_internal.make_partitions(), outbox_internal.make_partitions(parent => 'attempt');
"""


def step_sql(step: Migration) -> str:
    """Return the SQL of a migration."""
    min_relay = f"greatest(min_relay, {step.min_relay})"
    done = f"update outbox.meta set schema_version = {step.version}, min_relay = {min_relay};\n"  # noqa: S608 - two numbers
    return f"-- {step.name}\n{step.text}\n{done}"


def _grant_sql(kind: str, role: str) -> str:
    """Return the statement that records a grant, which fails with SQLSTATE 42704 if the role does not exist."""
    from psycopg import sql  # the migrations of an application that has only psycopg2 grant nothing

    name = sql.Literal(sql.Identifier(role).as_string()).as_string()
    return (
        f"insert into outbox.grantee (role_name, kind) select r.rolname, '{kind}' from pg_roles r "  # noqa: S608 - quoted
        f"where r.oid = {name}::regrole on conflict do nothing;\n"
    )
