"""The shop: writers that place orders and emit their events in the same transaction. A process of its own.

Every customer has a row that counts orders. A transaction locks the rows of some customers, raises their counts, emits
an event per customer with its count and stores the orders with the uids of their events. So the table of orders tells
what was committed, whatever became of any single COMMIT: of each customer events 1 to n must arrive, in that order.
Some transactions are rolled back, whole or to a savepoint, and now and then one stays open for a second.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psycopg
from psycopg.rows import TupleRow

from outbox_relay import outbox
from outbox_relay.workbench.demo.checker import Identity
from outbox_relay.workbench.embedded.process import ProcessFailed

CUSTOMERS = 2_000
WRITERS = 4
BASKETS = (1, 1, 2, 4, 8, 12)
"""How many orders a transaction places, by chance."""
TYPES = ("order.created", "order.paid", "order.shipped")
PACE_SECONDS = 0.25
"""How often the shop looks how fast it may be."""
UNDONE_SHARE = 0.05
"""How many transactions are rolled back, and how many go back to a savepoint."""
LONG_SHARE = 0.01
"""How many transactions of the first writer stay open for ``LONG_SECONDS``."""
LATE_SECONDS = 0.5
"""A writer that is later than this does not catch up."""
LONG_SECONDS = 1.0
"""How long a transaction stays open that is meant to."""
JOIN_SECONDS = 20
ASK_SECONDS = 10
"""Longest time for one question to the database."""
CONNECT_SECONDS = 10

TABLES = """
create table customer (name text primary key, orders bigint not null default 0);
create table orders (
    customer text not null references customer, number bigint not null, total numeric not null, event uuid not null,
    primary key (customer, number)
);
create table pace (events_per_second double precision not null);
"""
FILL = "insert into customer (name) select 'customer-' || g from generate_series(1, %s) g"
START_PACE = "insert into pace (events_per_second) values (%s)"
SET_PACE = "update pace set events_per_second = %s"
PACE = "select events_per_second from pace"
TAKE = """
with taken as (select name from customer where name = any(%s) order by name for update)
update customer c set orders = orders + 1 from taken where c.name = taken.name returning c.name, c.orders
"""
PLACE = """
insert into orders (customer, number, total, event)
select * from unnest(%s::text[], %s::bigint[], %s::numeric[], %s::uuid[])
"""
COUNT = "select coalesce(sum(orders), 0)::bigint from customer"
COMMITTED = "select customer, number, event::text from orders"


class ShopDatabase:
    """What the shop has committed, asked by the story over a connection of its own; and how fast it may go on.

    Raises :class:`ProcessFailed` when the database does not answer.
    """

    def __init__(self, dsn: str) -> None:
        with _asked():
            self._connection = psycopg.connect(
                dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, options=f"-c statement_timeout={ASK_SECONDS}s"
            )

    def prepare(self, events_per_second: float) -> None:
        """Make the shop's tables."""
        with _asked():
            self._connection.execute(TABLES)
            self._connection.execute(FILL, (CUSTOMERS,))
            self._connection.execute(START_PACE, (events_per_second,))

    def set_rate(self, events_per_second: float) -> None:
        """Let the shop emit so much from now on."""
        with _asked():
            self._connection.execute(SET_PACE, (events_per_second,))

    def count(self) -> int:
        """How many events are committed."""
        with _asked():
            [(number,)] = self._connection.execute(COUNT).fetchall()
            return number

    def committed(self) -> set[Identity]:
        """Every committed event."""
        with _asked():
            return set(self._connection.execute(COMMITTED).fetchall())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def _asked() -> Generator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise ProcessFailed(f"the shop's database did not answer: {error}") from error


@dataclass
class Shop:
    """``WRITERS`` threads that place orders until told to stop."""

    dsn: str
    events_per_second: float = 0.0
    rolled_back: int = 0
    """Events of whole transactions that were rolled back."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list[BaseException])

    def run(self) -> None:
        """Work until :meth:`stop` is called. Raises what ended a writer before that."""
        with psycopg.connect(self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
            self._look(connection)
            writers = [threading.Thread(target=self._write, args=(n,), daemon=True) for n in range(WRITERS)]
            for writer in writers:
                writer.start()
            while not self._stopping.wait(PACE_SECONDS):
                self._look(connection)
        for writer in writers:
            writer.join(JOIN_SECONDS)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """Finish the transactions under way."""
        self._stopping.set()

    def _look(self, connection: psycopg.Connection[TupleRow]) -> None:
        [(self.events_per_second,)] = connection.execute(PACE).fetchall()

    def _write(self, number: int) -> None:
        rng = random.Random()  # noqa: S311 - orders need not be unpredictable
        due = time.monotonic()
        try:
            with psycopg.connect(self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
                while not self._stopping.is_set():
                    placed = self._transact(connection, rng, is_patient=number == 0)
                    due = max(due, time.monotonic() - LATE_SECONDS) + max(1, placed) * WRITERS / self.events_per_second
                    self._stopping.wait(due - time.monotonic())
        except BaseException as error:
            self._failures.append(error)
            self._stopping.set()
            raise

    def _transact(self, connection: psycopg.Connection[TupleRow], rng: random.Random, *, is_patient: bool) -> int:
        """One transaction; returns how many events it committed."""
        is_long = is_patient and rng.random() < LONG_SHARE
        names = [f"customer-{n}" for n in rng.sample(range(1, CUSTOMERS + 1), 1 if is_long else rng.choice(BASKETS))]
        placed = 0
        with connection.transaction():
            placed = self._place(connection, rng, names)
            if rng.random() < UNDONE_SHARE:
                with connection.transaction():
                    self._place(connection, rng, names)
                    raise psycopg.Rollback
            if is_long:
                self._stopping.wait(LONG_SECONDS)
            if rng.random() < UNDONE_SHARE:
                self.rolled_back += placed
                placed = 0
                raise psycopg.Rollback
        return placed

    def _place(self, connection: psycopg.Connection[TupleRow], rng: random.Random, names: list[str]) -> int:
        """An order of each customer, its event and its row, in the transaction that is open."""
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
    """The process: works until SIGTERM, then writes what it did to the file of `--summary`."""
    parser = argparse.ArgumentParser(prog="outbox-relay demo: shop")
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
