"""The fixture of a database with one sink, whose shards the test owns."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.database import Database
from tests.support.ledger import Ledger, ledger


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one sink `s` for every type, owned by the relay `here`."""
    with ledger(database) as found:
        found.register(("s", ["*"], "beginning"))
        found.live("here", "s")
        found.own("s")
        yield found
