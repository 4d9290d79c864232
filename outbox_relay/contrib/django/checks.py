"""Checks of ``manage.py check``: databases that can have schema outbox, and the version of their schema.

They are warnings, because an error would stop the ``migrate`` that mends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.core.checks import CheckMessage, Info, Warning  # noqa: A004 - Django's name
from django.db import Error, connections

from outbox_relay.contrib.django.databases import asking, is_wanted
from outbox_relay.contrib.installing import SchemaState, schema_state
from outbox_relay.postgres.schema import SCHEMA_VERSION

MIGRATE: Final = (
    "Run `manage.py migrate outbox_relay --database {0}`, or, if Django has recorded that migration already, "
    "`manage.py outbox --database {0} migrate`."
)
UPGRADE: Final = "Run `manage.py outbox --database {0} migrate` as the owner of the schema."


def check_databases(**_: Any) -> list[CheckMessage]:
    """Return warnings about databases that emit cannot use."""
    wanted = [alias for alias in connections if is_wanted(alias)]
    if not wanted:
        hint = "Use django.db.backends.postgresql, or let a router allow the application outbox_relay."
        return [Warning("no database of DATABASES can have schema outbox", hint=hint, id="outbox_relay.W001")]
    if _has_psycopg_3():
        return [_without_autocommit(alias) for alias in wanted if not connections[alias].settings_dict["AUTOCOMMIT"]]
    hint = "Install psycopg 3 (`pip install psycopg`), or emit with SQL as docs/emitting.md shows."
    return [Warning("Django uses psycopg 2, and emit needs psycopg 3", hint=hint, id="outbox_relay.W002")]


def _without_autocommit(alias: str) -> CheckMessage:
    said = f"database {alias!r} has AUTOCOMMIT = False, and emit refuses to run outside an atomic block"
    return Warning(said, hint="Use atomic blocks, or pass require_atomic=False to emit.", id="outbox_relay.W008")


def check_schemas(*, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Return warnings about the schema of each of ``databases``, which Django names when it may be asked."""
    return [message for alias in databases or () if is_wanted(alias) for message in _check_schema(alias)]


def _check_schema(alias: str) -> list[CheckMessage]:
    try:
        state = schema_state(asking(connections[alias]))
    except Error as error:
        said = f"database {alias!r} could not be asked for schema outbox ({type(error).__name__})"
        return [Warning(said, id="outbox_relay.W003")]
    if (problem := _problem(state)) is not None:
        text, hint, number = problem
        return [Warning(f"database {alias!r}: {text}", hint=hint and hint.format(alias), id=f"outbox_relay.{number}")]
    if state.version is not None and state.version > SCHEMA_VERSION:
        said = f"database {alias!r}: schema outbox has version {state.version}, newer than this outbox-relay's"
        return [Info(f"{said} {SCHEMA_VERSION}, which works on it", id="outbox_relay.I001")]
    return []


def _problem(state: SchemaState) -> tuple[str, str | None, str] | None:
    """Return text, hint and number of a warning about a schema, or None."""
    if state.is_foreign:
        return state.problem or "", None, "W004"
    if state.version == 0:
        return "schema outbox is missing", MIGRATE, "W005"
    if state.version is not None and state.version < SCHEMA_VERSION:
        return f"schema outbox has version {state.version}, and this outbox-relay {SCHEMA_VERSION}", UPGRADE, "W006"
    return (state.problem, "Install a newer outbox-relay.", "W007") if state.problem else None


def _has_psycopg_3() -> bool:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    return is_psycopg3
