"""Findings of doctor, without those on every server of the tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from outbox_relay.admin.doctor import Finding, doctor
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger

EXPECTED = {"durability-off"}
"""Findings on every server of the tests: it runs without fsync."""


async def findings(books: Ledger) -> dict[str, Finding]:
    """Return the findings by id, without those on every server of the tests."""
    return {finding.id: finding for finding in await doctor(books.store) if finding.id not in EXPECTED}


@asynccontextmanager
async def a_served_sink(database: Database) -> AsyncGenerator[Ledger]:
    """Yield a database with one live relay that owns the shards of sink s, all at the end of the log."""
    async with ledger(database) as found:
        await found.register(("s", ["test.*"], "beginning"))
        await found.live("relay-1", "s")
        await found.own("s")
        yield found
