"""A sink with ``claim = "rows"`` whose windows a test parks, and from whose queue it claims, without a relay."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from outbox_relay import outbox
from outbox_relay.domain.window import BEGINNING, Position, next_slice, position_after
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, ParkedWindow
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger

SINK = "jobs"
AMPLE = 1 << 40


@dataclass
class Queue:
    """The queue of one sink, all shards of which one relay owns, and a place in its walk over tenants."""

    books: Ledger
    sink: str = SINK
    position: Position = field(default_factory=lambda: Position(BEGINNING))
    tenant: str | None = None
    unfinished: bool = False

    def emit(self, *events: outbox.Event) -> list[str]:
        """Emit events in one transaction, and return their uids."""
        with self.books.database.connect() as connection:
            return [str(uid) for uid in outbox.emit_many(connection, events)]

    def park(self, *, rows: int = 4000, fair: bool = False, **changes: Any) -> ParkedWindow:
        """Park the next slice of the window that is open, or of a new one."""
        if self.position.b is None:
            self.position = self.position.opened(self.books.tick())
        piece = next_slice(self.position, 1 << 40)
        values: dict[str, Any] = {"owner": self.books.relay, "epochs": self.books.epochs[self.sink], **changes}
        parked = self.books.store.park_window(
            *(self.sink, values.pop("owner"), values.pop("epochs"), None, self.position),
            *(position_after(self.position, piece), piece, rows, values.pop("most_bytes", AMPLE)),
            fair=fair,
            **values,
        )
        end = position_after(self.position, piece)
        self.position = end if parked.upto is None else self.position.at(parked.upto)
        return parked

    def claim(self, rows: int = 10, *, owner: UUID | None = None, **changes: Any) -> list[ClaimedRow]:
        """Claim rows, with ``fair`` from where the last walk ended on."""
        values: dict[str, Any] = {"after": self.tenant, **changes}
        lease_seconds, most_bytes = values.pop("lease_seconds", 60.0), values.pop("most_bytes", AMPLE)
        claim = self.books.store.claim_queued(
            self.sink, owner or self.books.relay, uuid4(), lease_seconds, rows, most_bytes, **values
        )
        self.tenant, self.unfinished = claim.walk_end, claim.unfinished
        return claim.rows

    def done(self, claimed: Sequence[ClaimedRow]) -> int:
        """Settle claimed rows as delivered; return how many leases were still valid."""
        return len(self.books.store.delete_rows(self.sink, [DeliveredRow(row.event.id, row.lease) for row in claimed]))


def job(name: str, **options: Any) -> outbox.Event:
    """Return an event whose type is a name by which tests tell it from others."""
    return outbox.Event(name, {}, **options)


def names(claimed: Sequence[ClaimedRow]) -> list[str]:
    """Return the names of claimed jobs, in the order in which they are to be delivered."""
    return [row.event.type for row in claimed]


@contextmanager
def queue(database: Database, sink: str = SINK) -> Generator[Queue]:
    """Yield a registered sink that has parked nothing yet."""
    with ledger(database) as books:
        registered = books.store.register_sinks([(sink, ["*"], "beginning")], books.tick(), queued=[sink])
        books.generations.update(registered)
        books.own(sink)
        yield Queue(books, sink)
