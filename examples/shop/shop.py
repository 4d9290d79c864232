"""Run a small shop that commits each change of an order together with the events about it.

SHOP_DSN is the connection string of a role that was granted with `outbox-relay migrate --grant-emit`, and
SHOP_ORDERS_PER_SECOND the rate of new orders. The shop runs until SIGTERM.
"""

import os
import random
import signal
import sys
import threading
import time

import psycopg

from outbox_relay import outbox

closing = threading.Event()


def place_order(connection: psycopg.Connection) -> None:
    """Insert a new order and emit an event about it."""
    total = f"{random.randint(100, 99_999) / 100:.2f}"  # noqa: S311 - a price
    with connection.transaction():
        row = connection.execute("insert into orders (total) values (%s) returning id", (total,)).fetchone()
        assert row is not None  # noqa: S101 - an insert returns its row
        outbox.emit(connection, "order.created", {"order": row[0], "total": total}, key=f"order-{row[0]}")


# The row is locked before an event about it is emitted. Transactions that change the same order therefore wait for each
# other, and their events are in the order of the commits.
PAY = """
update orders set paid_at = now()
 where id = (select id from orders where paid_at is null order by id limit 1 for update skip locked)
returning id, total::text
"""


def take_payment(connection: psycopg.Connection) -> None:
    """Mark the oldest unpaid order as paid and emit two events, which different sinks receive."""
    with connection.transaction():
        row = connection.execute(PAY).fetchone()
        if row is not None:
            key = f"order-{row[0]}"
            outbox.emit(connection, "payment.captured", {"order": row[0], "amount": row[1]}, key=key)
            outbox.emit(connection, "order.paid", {"order": row[0]}, key=key)


def trade(connection: psycopg.Connection, orders_per_second: float) -> None:
    """Place orders and take payments until the shop closes."""
    while not closing.wait(random.expovariate(orders_per_second)):
        place_order(connection)
        take_payment(connection)


def close(_number: int, _frame: object) -> None:
    """Finish the current transaction and begin no other."""
    closing.set()


def main() -> None:
    """Trade, and reconnect if the connection to the database is lost."""
    signal.signal(signal.SIGTERM, close)
    dsn = os.environ.get("SHOP_DSN", "postgresql://shop_app@localhost/shop")
    orders_per_second = float(os.environ.get("SHOP_ORDERS_PER_SECOND", "5"))
    while not closing.is_set():
        try:
            with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
                sys.stdout.write("the shop is open\n")
                trade(connection, orders_per_second)
        except psycopg.OperationalError as error:
            sys.stderr.write(f"the database is away: {error}\n")
            time.sleep(1)
    sys.stdout.write("the shop is closed\n")


if __name__ == "__main__":
    main()
