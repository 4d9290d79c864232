"""The connection of one command: opened, its schema checked, closed again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from outbox_relay.domain.errors import Unusable
from outbox_relay.postgres.store import Store

Fit = Callable[[int, int], str | None]
"""Given the version of the schema and the oldest relay that it takes: what is wrong, or nothing."""


@asynccontextmanager
async def opened(dsn: Callable[[], str], *, pooler: bool, fit: Fit | None) -> AsyncGenerator[Store]:
    """A store on one connection. With ``fit`` the schema must fit; without, it is not looked at.

    Raises ``Unusable`` when password, rights or schema are wrong, ``DatabaseLost`` when the database does not answer.
    """
    store = Store(dsn, pooler=pooler, connections=1)
    try:
        await store.open()
        if fit is not None and (problem := fit(*await store.schema())):
            raise Unusable(problem)
        yield store
    finally:
        await store.close()
