"""The database connection of one command."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres import migrations
from outbox_relay.postgres.errors import advise_grant
from outbox_relay.postgres.store import Store


@contextmanager
def connect(dsn: Callable[[], str], *, pooler: bool, check_schema: bool, grant: str = "read") -> Generator[Store]:
    """Open a store on one connection, and close it at the end.

    ``grant`` is the kind of grant that the caller needs, which is named if the role has no right to something.

    Raises ``DatabaseUnusable`` if password, rights or schema are wrong, ``DatabaseUnavailable`` if the database does
    not answer.
    """
    store = Store(dsn, pooler=pooler, connections=1)
    try:
        with advise_grant(grant):
            store.open()
            if check_schema and (problem := migrations.fit(*store.schema())):
                raise DatabaseUnusable(problem)
            yield store
    finally:
        store.close()
