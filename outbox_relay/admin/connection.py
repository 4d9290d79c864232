"""The database connection of one command."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.store import Store

Fit = Callable[[int, int], str | None]
"""Checks the version of the schema and its oldest supported relay; returns the problem or None."""


@asynccontextmanager
async def connect(dsn: Callable[[], str], *, pooler: bool, fit: Fit | None) -> AsyncGenerator[Store]:
    """Open a store on one connection, and close it at the end.

    ``fit`` checks the schema, unless it is None.

    Raises ``DatabaseUnusable`` if password, rights or schema are wrong, ``DatabaseUnavailable`` if the database does
    not answer.
    """
    store = Store(dsn, pooler=pooler, connections=1)
    try:
        await store.open()
        if fit is not None and (problem := fit(*await store.schema())):
            raise DatabaseUnusable(problem)
        yield store
    finally:
        await store.close()
