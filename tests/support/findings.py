"""Findings of doctor, without those on every server of the tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from outbox_relay.admin.doctor import Finding, doctor
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger

EXPECTED = {"durability-off"}
"""Findings on every server of the tests: it runs without fsync."""


def findings(books: Ledger) -> dict[str, Finding]:
    """Return the findings by id, without those on every server of the tests."""
    return {finding.id: finding for finding in doctor(books.store) if finding.id not in EXPECTED}


@contextmanager
def a_served_sink(database: Database) -> Generator[Ledger]:
    """Yield a database with one live relay that owns the shards of sink s, all at the end of the log."""
    with ledger(database) as found:
        found.register(("s", ["test.*"], "beginning"))
        found.live("relay-1", "s")
        found.own("s")
        yield found
