"""Fixtures that several modules use; a module with needs of its own defines another one of the same name."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.roles import new_role


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with the sink `s` for every type, owned by one relay."""
    with ledger(database) as found:
        found.register(("s", ["*"], "beginning"))
        found.own("s")
        yield found


@pytest.fixture
def app(database: Database) -> Generator[str]:
    """Yield an application's role."""
    with new_role(database, "app") as name:
        migrate(database.dsn, grant_emit=[name])
        yield name


@pytest.fixture
def relay(database: Database) -> Generator[str]:
    """Yield a relay's role."""
    with new_role(database, "relay") as name:
        migrate(database.dsn, grant_relay=[name])
        yield name
