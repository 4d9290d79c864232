"""Program that places orders and emits their events in the same transaction.

Every customer has a row with a counter. A transaction locks the rows of some customers, increments their counters,
emits one event per customer with the new value and stores the orders with the uids of their events. The orders table
thus shows which events were committed, even if the result of a COMMIT is unknown. For each customer, events 1 to n must
arrive in that order. Some transactions are rolled back,
completely or to a savepoint.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import FrameType

import psycopg
from psycopg.rows import TupleRow

from outbox_relay import outbox
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.shop.arrivals import Identity

Connection = psycopg.Connection[TupleRow]

CUSTOMERS = 2_000
WRITERS = 4
EVENTS_PER_SECOND = 400.0
"""A rate that any machine can deliver. Each shard gets several events per second."""
BASKETS = (1, 1, 2, 4, 8, 12)
"""Numbers of orders per transaction, chosen at random."""
TYPES = ("order.created", "order.paid", "order.shipped")
RECONNECT_SECONDS = 0.1
ROLLBACK_SHARE = 0.05
"""Share of transactions that are rolled back, and share that roll back to a savepoint."""
LATE_SECONDS = 0.5
"""A writer catches up at most this delay."""
JOIN_SECONDS = 20
QUERY_SECONDS = 10
"""Statement timeout."""
CONNECT_SECONDS = 10

TABLES = """
create table customer (name text primary key, orders bigint not null default 0);
create table orders (
    customer text not null references customer, number bigint not null, total numeric not null, event uuid not null,
    primary key (customer, number)
);
"""
FILL = "insert into customer (name) select 'customer-' || g from generate_series(1, %s) g"
NEW = "insert into customer (name) select unnest(%s::text[])"
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
SHARDS = "select name, outbox_internal.shard_of(name, gen_random_uuid()) from customer"
DEAD = "select count(*) from outbox.delivery where state = 'dead'"
COMMITTED = "select customer, number, event::text from orders"


class ShopDatabase:
    """Statements of the demo in the shop's database; each opens a connection.

    Methods raise :class:`ProcessFailed` if the database does not answer.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def prepare(self) -> None:
        """Create the shop's tables."""
        self._run(TABLES)
        self._run(FILL, CUSTOMERS)

    def emit_invoices(self, count: int) -> None:
        """Emit events for the sink whose destination refuses them."""
        self._run(INVOICES, count)

    def place_damaged(self, statuses: Sequence[int]) -> None:
        """Place an order of a new customer for each status, with which the broken receiver answers it."""
        names = [f"damaged-{number}" for number in range(len(statuses))]
        self._run(NEW, names)
        with self._connect() as connection, connection.transaction():
            place(connection, names, ["1.00"] * len(names), [{"damaged": status} for status in statuses])

    def shards(self) -> Mapping[str, int]:
        """Return the shard of each customer."""
        return dict(self._run(SHARDS))

    def count(self) -> int:
        """Return the number of committed events."""
        [(number,)] = self._run(COUNT)
        return number

    def committed(self) -> set[Identity]:
        """Return all committed events."""
        return set(self._run(COMMITTED))

    def dead(self) -> int:
        """Return the number of dead letters."""
        [(number,)] = self._run(DEAD)
        return number

    def _run(self, statement: str, *parameters: object) -> list[TupleRow]:
        with self._connect() as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _connect(self) -> Generator[Connection]:
        options = f"-c statement_timeout={QUERY_SECONDS}s"
        try:
            with psycopg.connect(
                self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, options=options
            ) as connection:
                yield connection
        except psycopg.Error as error:
            raise ProcessFailed(f"the shop's database did not answer: {error}") from error


def place(
    connection: Connection, names: Sequence[str], totals: Sequence[str], extra: Iterable[Mapping[str, object]]
) -> int:
    """Store an order of each customer and emit its event, in the current transaction; return their number.

    `extra` has more members of the payloads, in the order of the names.
    """
    taken: list[tuple[str, int]] = sorted(connection.execute(TAKE, (list(names),)).fetchall())
    events = [
        outbox.Event(
            TYPES[number % len(TYPES)],
            {"customer": name, "number": number, "total": total, "emitted_at": time.time(), **more},
            key=name,
        )
        for (name, number), total, more in zip(taken, totals, extra, strict=False)
    ]
    uids = outbox.emit_many(connection, events)
    numbers = [number for _, number in taken]
    connection.execute(PLACE, ([name for name, _ in taken], numbers, list(totals), uids))
    return len(events)


@dataclass
class Shop:
    """``WRITERS`` threads that place orders until :meth:`stop` is called.

    They continue after a lost connection: the ledger shows what became of a COMMIT without an answer.
    """

    dsn: str
    rolled_back: int = 0
    """Number of events in transactions that were rolled back completely."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list[BaseException])

    def run(self) -> None:
        """Place orders until :meth:`stop` is called. Raise the first exception of a writer."""
        writers = [threading.Thread(target=self._repeat, daemon=True) for _ in range(WRITERS)]
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

    def _repeat(self) -> None:
        """Write on a connection until the shop stops, and on a new one after a lost connection."""
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
                    self._write(connection)
            except (psycopg.OperationalError, psycopg.Rollback):
                # psycopg passes on the Rollback of a transaction whose connection is lost.
                self._stopping.wait(RECONNECT_SECONDS)
            except BaseException as error:
                self._failures.append(error)
                self._stopping.set()
                raise

    def _write(self, connection: Connection) -> None:
        rng = random.Random()  # noqa: S311 - orders need not be unpredictable
        due = time.monotonic()
        while not self._stopping.is_set():
            placed = self._transact(connection, rng)
            due = max(due, time.monotonic() - LATE_SECONDS) + max(1, placed) * WRITERS / EVENTS_PER_SECOND
            self._stopping.wait(due - time.monotonic())

    def _transact(self, connection: Connection, rng: random.Random) -> int:
        """Run one transaction and return the number of events that it committed."""
        names = [f"customer-{n}" for n in rng.sample(range(1, CUSTOMERS + 1), rng.choice(BASKETS))]
        totals = [f"{rng.randint(100, 99_999) / 100:.2f}" for _ in names]
        placed = 0
        with connection.transaction():
            placed = place(connection, names, totals, repeat({}))
            if rng.random() < ROLLBACK_SHARE:
                with connection.transaction():
                    place(connection, names, totals, repeat({}))
                    raise psycopg.Rollback
            if rng.random() < ROLLBACK_SHARE:
                self.rolled_back += placed
                placed = 0
                raise psycopg.Rollback
        return placed


def main() -> int:
    """Place orders until SIGTERM, then write the number of rolled-back events to the file `--summary`."""
    parser = argparse.ArgumentParser(prog="outbox-relay shop: shop")
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--summary", type=Path, required=True)
    arguments = parser.parse_args()
    shop = Shop(arguments.dsn)

    def stop(_number: int, _frame: FrameType | None) -> None:
        shop.stop()

    signal.signal(signal.SIGTERM, stop)
    shop.run()
    arguments.summary.write_text(json.dumps({"rolled_back": shop.rolled_back}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
