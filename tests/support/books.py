"""The fixture of a database with one sink, whose shards the test owns."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.support.database import Database
from tests.support.ledger import Ledger, ledger


@pytest.fixture
async def books(database: Database) -> AsyncGenerator[Ledger]:
    """Yield a database with one sink `s` for every type, owned by the relay `here`."""
    async with ledger(database) as found:
        await found.register(("s", ["*"], "beginning"))
        await found.live("here", "s")
        await found.own("s")
        yield found
