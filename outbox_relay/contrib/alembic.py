"""Schema outbox in the revisions of Alembic, over a synchronous or asynchronous connection of psycopg, or psycopg2.

docs/alembic.md shows every use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from alembic.operations import Operations
from sqlalchemy import Connection

from outbox_relay.contrib.installing import DROP, Ask, may_drop, missing_script
from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.schema import script

__all__ = ["DatabaseUnusable", "drop", "include_object", "upgrade"]

SCHEMA: Final = "outbox"
DRIVERS: Final = ("psycopg", "psycopg_async", "psycopg2")
"""The drivers that send a script of several statements."""


def upgrade(op: Operations | Any, *, have: int = 0) -> None:
    """Create schema outbox or bring it to the version of the installed package, in the transaction of the revision.

    ``op`` is ``alembic.op``. Offline, with ``alembic upgrade --sql``, the script begins at version ``have``.

    Raises ``DatabaseUnusable`` for another program's schema, a newer one that needs a newer package, and a driver
    that cannot send a script.
    """
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(script(have=have))
        return
    connection = _connection(op)
    if (missing := missing_script(_asking(connection))) is not None:
        _run(connection, missing)


def drop(op: Operations | Any) -> None:
    """Drop schema outbox.

    Raises ``DatabaseUnusable`` while a relay runs, or an event or a dead letter is not delivered. Offline, nothing is
    checked.
    """
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(f"{DROP};")
        return
    connection = _connection(op)
    if may_drop(_asking(connection)):
        _run(connection, DROP)


def include_object(
    object: Any,  # noqa: A002 - Alembic's name
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: Any,
) -> bool:
    """Return False for the tables of schema outbox and what belongs to them, as ``context.configure`` asks."""
    table = object if type_ == "table" else getattr(object, "table", None)
    return getattr(table, "schema", None) != SCHEMA


def _connection(op: Any) -> Connection:
    connection = op.get_bind()
    if connection.dialect.driver not in DRIVERS:
        raise DatabaseUnusable(
            f"the driver {connection.dialect.driver} cannot send a script; use one of {', '.join(DRIVERS)} for "
            "migrations, or run outbox-relay migrate"
        )
    return connection


def _asking(connection: Connection) -> Ask:
    def ask(statement: str) -> Sequence[Sequence[Any]]:
        result = _run(connection, statement)
        return result.all() if result.returns_rows else ()

    return ask


def _run(connection: Connection, statement: str) -> Any:
    """Run a statement as it is, without a parameter, so that no character of it has a meaning for the driver."""
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
