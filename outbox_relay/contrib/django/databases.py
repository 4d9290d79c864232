"""The databases of a Django project that have schema outbox: which they are, their schema, and their address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import pq
from psycopg.conninfo import make_conninfo

from outbox_relay.contrib.installing import Ask

LABEL: Final = "outbox_relay"
"""The label of the application, which database routers are asked about."""
POSTGRESQL: Final = "postgresql"


def is_wanted(alias: str, app_label: str = LABEL) -> bool:
    """Return True if a database is PostgreSQL, and no router says that it does not have schema outbox."""
    return connections[alias].vendor == POSTGRESQL and router.allow_migrate(alias, app_label)


def asking(connection: BaseDatabaseWrapper) -> Ask:
    """Return the function that runs a statement over Django's connection, and returns its rows."""

    def ask(statement: str) -> Sequence[Sequence[Any]]:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else ()

    return ask


def dsn_of(alias: str) -> str:
    """Return the connection string of a database in ``settings.DATABASES``, for libpq. It contains the password.

    Raises ``ImproperlyConfigured`` if the database is not PostgreSQL.
    """
    wrapper = connections[alias]
    if wrapper.vendor != POSTGRESQL:
        raise ImproperlyConfigured(f"DATABASES[{alias!r}] is {wrapper.vendor}, and the outbox needs PostgreSQL")
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given: dict[str, Any] = {
        name: value for name, value in wrapper.get_connection_params().items() if name in known and value is not None
    }
    if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
        escaped = role.replace("\\", "\\\\").replace(" ", "\\ ")
        given["options"] = f"{given.get('options', '')} -c role={escaped}".strip()
    return make_conninfo(**given)


def is_pooled(alias: str) -> bool:
    """Return True if the settings say that a database is behind a proxy that pools transactions."""
    return bool(connections[alias].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"))
