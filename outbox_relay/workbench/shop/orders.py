"""Program that places orders and emits their events in the same transaction.

Every customer has a row with a counter. A transaction locks the rows of some customers, increments their counters,
emits one event per customer with the new value and stores the orders with the uids of their events. The orders table
thus shows which events were committed, even if the result of a COMMIT is unknown. For each customer, events 1 to n must
arrive in that order. Some transactions are rolled back, completely or to a savepoint, and a few stay open for a second.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import psycopg
from psycopg.rows import TupleRow

from outbox_relay import outbox
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.shop.checker import Identity

CUSTOMERS = 2_000
WRITERS = 4
BASKETS = (1, 1, 2, 4, 8, 12)
"""Numbers of orders per transaction, chosen at random."""
TYPES = ("order.created", "order.paid", "order.shipped")
RECONNECT_SECONDS = 0.1
RATE_SECONDS = 0.25
"""Interval between reads of the emit rate."""
ROLLBACK_SHARE = 0.05
"""Share of transactions that are rolled back, and share that roll back to a savepoint."""
LONG_SHARE = 0.01
"""Share of the first writer's transactions that stay open for ``LONG_SECONDS``."""
LATE_SECONDS = 0.5
"""A writer catches up at most this delay."""
LONG_SECONDS = 1.0
JOIN_SECONDS = 20
QUERY_SECONDS = 10
"""Statement timeout of a query."""
CONNECT_SECONDS = 10

TABLES = """
create table customer (name text primary key, orders bigint not null default 0);
create table orders (
    customer text not null references customer, number bigint not null, total numeric not null, event uuid not null,
    primary key (customer, number)
);
create table emit_rate (events_per_second double precision not null);
"""
FILL = "insert into customer (name) select 'customer-' || g from generate_series(1, %s) g"
START_RATE = "insert into emit_rate (events_per_second) values (%s)"
SET_RATE = "update emit_rate set events_per_second = %s"
READ_RATE = "select events_per_second from emit_rate"
TAKE = """
with taken as (select name from customer where name = any(%s) order by name for update)
update customer c set orders = orders + 1 from taken where c.name = taken.name returning c.name, c.orders
"""
PLACE = """
insert into orders (customer, number, total, event)
select * from unnest(%s::text[], %s::bigint[], %s::numeric[], %s::uuid[])
"""
INVOICES = """
select outbox.emit('invoice.created', jsonb_build_object('invoice', n), key => 'invoice-' || n %% 4)
  from generate_series(1, %s) n"""
COUNT = "select coalesce(sum(orders), 0)::bigint from customer"
COMMITTED = "select customer, number, event::text from orders"


class ShopDatabase:
    """Connection of the demo to the shop's database, to count committed events and to set the emit rate.

    Methods raise :class:`ProcessFailed` if the database does not answer.
    """

    def __init__(self, dsn: str) -> None:
        with _query_errors():
            self._connection = psycopg.connect(
                dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, options=f"-c statement_timeout={QUERY_SECONDS}s"
            )

    def prepare(self, events_per_second: float) -> None:
        """Create the shop's tables."""
        with _query_errors():
            self._connection.execute(TABLES)
            self._connection.execute(FILL, (CUSTOMERS,))
            self._connection.execute(START_RATE, (events_per_second,))

    def set_emit_rate(self, events_per_second: float) -> None:
        """Set the rate at which the shop may emit."""
        with _query_errors():
            self._connection.execute(SET_RATE, (events_per_second,))

    def emit_invoices(self, count: int) -> None:
        """Emit events for the sink whose destination refuses them."""
        with _query_errors():
            self._connection.execute(INVOICES, (count,))

    def count(self) -> int:
        """Return the number of committed events."""
        with _query_errors():
            [(number,)] = self._connection.execute(COUNT).fetchall()
            return number

    def committed(self) -> set[Identity]:
        """Return all committed events."""
        with _query_errors():
            return set(self._connection.execute(COMMITTED).fetchall())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def _query_errors() -> Generator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise ProcessFailed(f"the shop's database did not answer: {error}") from error


@dataclass
class Shop:
    """``WRITERS`` threads that place orders until :meth:`stop` is called."""

    dsn: str
    long_share: float = LONG_SHARE
    """Share of the first writer's transactions that stay open for ``LONG_SECONDS``."""
    reconnects: bool = False
    """True if it continues after a lost connection. The ledger shows what became of a COMMIT without an answer."""
    events_per_second: float = 0.0
    rolled_back: int = 0
    """Number of events in transactions that were rolled back completely."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list[BaseException])

    def run(self) -> None:
        """Place orders until :meth:`stop` is called. Raise the first exception of a writer."""
        with self._connect() as connection:
            self._read_rate(connection)
        tasks = (self._follow_rate, *(partial(self._write, n) for n in range(WRITERS)))
        writers = [threading.Thread(target=self._repeat, args=(task,), daemon=True) for task in tasks]
        for writer in writers:
            writer.start()
        self._stopping.wait()
        for writer in writers:
            writer.join(JOIN_SECONDS)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """Ask the writers to finish their current transactions."""
        self._stopping.set()

    def _read_rate(self, connection: psycopg.Connection[TupleRow]) -> None:
        [(self.events_per_second,)] = connection.execute(READ_RATE).fetchall()

    def _follow_rate(self, connection: psycopg.Connection[TupleRow]) -> None:
        """Read the emit rate again and again, until the shop stops."""
        while not self._stopping.wait(RATE_SECONDS):
            self._read_rate(connection)

    def _repeat(self, task: Callable[[psycopg.Connection[TupleRow]], None]) -> None:
        """Run a task on a connection until the shop stops, and again on a new one if the shop reconnects."""
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    task(connection)
            except BaseException as error:
                # psycopg passes on the Rollback of a transaction whose connection is lost.
                if self.reconnects and isinstance(error, (psycopg.OperationalError, psycopg.Rollback)):
                    self._stopping.wait(RECONNECT_SECONDS)
                    continue
                self._failures.append(error)
                self._stopping.set()
                raise

    def _connect(self) -> psycopg.Connection[TupleRow]:
        return psycopg.connect(self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS)

    def _write(self, number: int, connection: psycopg.Connection[TupleRow]) -> None:
        rng = random.Random()  # noqa: S311 - orders need not be unpredictable
        due = time.monotonic()
        while not self._stopping.is_set():
            placed = self._transact(connection, rng, may_be_long=number == 0)
            due = max(due, time.monotonic() - LATE_SECONDS) + max(1, placed) * WRITERS / self.events_per_second
            self._stopping.wait(due - time.monotonic())

    def _transact(self, connection: psycopg.Connection[TupleRow], rng: random.Random, *, may_be_long: bool) -> int:
        """Run one transaction and return the number of events that it committed."""
        is_long = may_be_long and rng.random() < self.long_share
        names = [f"customer-{n}" for n in rng.sample(range(1, CUSTOMERS + 1), 1 if is_long else rng.choice(BASKETS))]
        placed = 0
        with connection.transaction():
            placed = self._place(connection, rng, names)
            if rng.random() < ROLLBACK_SHARE:
                with connection.transaction():
                    self._place(connection, rng, names)
                    raise psycopg.Rollback
            if is_long:
                self._stopping.wait(LONG_SECONDS)
            if rng.random() < ROLLBACK_SHARE:
                self.rolled_back += placed
                placed = 0
                raise psycopg.Rollback
        return placed

    def _place(self, connection: psycopg.Connection[TupleRow], rng: random.Random, names: list[str]) -> int:
        """Store an order and emit its event for each customer, in the current transaction."""
        taken = connection.execute(TAKE, (names,)).fetchall()
        totals = [f"{rng.randint(100, 99_999) / 100:.2f}" for _ in taken]
        events = [
            outbox.Event(
                rng.choice(TYPES),
                {"customer": name, "number": number, "total": total, "emitted_at": time.time()},
                key=name,
            )
            for (name, number), total in zip(taken, totals, strict=True)
        ]
        if len(events) == 1:
            [event] = events
            uids = [outbox.emit(connection, event.type, event.payload, key=event.key)]
        else:
            uids = outbox.emit_many(connection, events)
        connection.execute(PLACE, ([name for name, _ in taken], [number for _, number in taken], totals, uids))
        return len(events)


def main() -> int:
    """Place orders until SIGTERM, then write the number of rolled-back events to the file `--summary`."""
    parser = argparse.ArgumentParser(prog="outbox-relay shop: shop")
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--summary", type=Path, required=True)
    parser.add_argument("--long-share", type=float, default=LONG_SHARE)
    parser.add_argument("--reconnects", action="store_true")
    arguments = parser.parse_args()
    shop = Shop(arguments.dsn, arguments.long_share, arguments.reconnects)

    def stop(_number: int, _frame: FrameType | None) -> None:
        shop.stop()

    signal.signal(signal.SIGTERM, stop)
    shop.run()
    arguments.summary.write_text(json.dumps({"rolled_back": shop.rolled_back}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
