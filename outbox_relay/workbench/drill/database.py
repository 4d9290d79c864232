"""The database of a drill, as its application and its operator use it: each call opens a connection of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from outbox_relay import admin, outbox
from outbox_relay.postgres.store import Store
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.shop.checker import Identity
from outbox_relay.workbench.shop.orders import CONNECT_SECONDS, CUSTOMERS, PLACE, QUERY_SECONDS, TAKE, ShopDatabase

Connection = psycopg.Connection[TupleRow]

SHARDS = "select name, outbox_internal.shard_of(name, gen_random_uuid()) from customer"
UNLOADABLE = """
insert into outbox.event (shard, type, key, payload, deliver_at)
select outbox_internal.shard_of('customer-' || n, null), 'order.created', 'customer-' || n, convert_to('{}', 'UTF8'),
       '20000-01-01 00:00:00+00'
from generate_series(1, %s) n
"""
"""Events that `emit` refuses and no client can load: the year 20000."""
DEAD = "select sink, count(*) from outbox.delivery where state = 'dead' group by sink"
UNANSWERED = """
select distinct sink, uid::text from outbox.attempt
where outcome <> 'delivered' and status is null and error not like 'no connection was made%%'
"""
"""Failed attempts in which a request may have been sent and was not answered."""
WAITING = "select count(*), coalesce(max(attempts), 0) from outbox.delivery where sink = %s and state <> 'dead'"
LOCK = "select name from customer order by name for update"
BURST = """
with raised as (update customer set orders = orders + %(each)s returning name, orders),
numbered as (
    select name, number from raised, generate_series(orders - %(each)s + 1, orders) number order by number, name
)
insert into orders (customer, number, total, event)
select name, number, 1, outbox.emit(
    'order.created', jsonb_build_object(
        'customer', name, 'number', number, 'emitted_at', extract(epoch from clock_timestamp())
    ), key => name)
from numbered
"""
BURST_SECONDS = 60
LATE = "insert into customer (name, orders) values (%s, 0)"
LATE_ORDERS = 20
SYNCHRONOUS = ("alter system set synchronous_standby_names = '{name}'", "select pg_reload_conf()")
ACTOR = "drill"
STREAMING = "select true from pg_stat_replication where application_name = %s and sync_state = 'sync'"


class DrillDatabase:
    """Statements of a drill. Methods raise :class:`ProcessFailed` if one fails."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def prepare(self, events_per_second: float) -> None:
        """Create the shop's tables."""
        with self._shop() as shop:
            shop.prepare(events_per_second)

    def committed(self) -> set[Identity]:
        """Return all events that the shop committed."""
        with self._shop() as shop:
            return shop.committed()

    def shards(self) -> Mapping[str, int]:
        """Return the shard of each customer."""
        return dict(self._fetch(SHARDS))

    def place_damaged(self, status: int, customers: Sequence[str]) -> list[str]:
        """Place an order of each customer that the broken receiver answers with `status`; return the uids."""
        with self._connect() as connection, connection.transaction():
            return _place(connection, customers, damaged=status)

    def insert_unloadable(self, count: int) -> None:
        """Insert events that no relay can load, as only the owner of the log can."""
        self._fetch(UNLOADABLE, (count,), rows=False)

    def dead(self) -> Mapping[str, int]:
        """Return the number of dead letters of each sink that has any."""
        return dict(self._fetch(DEAD))

    def unanswered(self) -> Sequence[tuple[str, str]]:
        """Return sink and uid of every event that has a record of an attempt without an answer."""
        return self._fetch(UNANSWERED, ())

    def waiting(self, sink: str) -> tuple[int, int]:
        """Return the number of rows of a sink that are not dead, and the most attempts of one."""
        [(rows, attempts)] = self._fetch(WAITING, (sink,))
        return rows, attempts

    def place_many(self, events: int) -> int:
        """Place the same number of orders for every customer in one transaction; return the number of all."""
        each = max(1, events // CUSTOMERS)
        with self._connect(BURST_SECONDS) as connection, connection.transaction():
            connection.execute(LOCK)
            return connection.execute(BURST, {"each": each}).rowcount

    def retry_dead(self, sink: str, status: int) -> int:
        """Retry the dead letters of a sink that were answered with `status`; return their number."""
        wanted = {"sink": sink, "status": status, "states": ["dead"]}
        return self._act(lambda store: admin.retry_deliveries(store, wanted, actor=ACTOR, report=_ignore))

    def discard_dead(self) -> int:
        """Discard all dead letters and return their number."""
        wanted = {"states": ["dead"]}
        return self._act(
            lambda store: admin.discard_deliveries(store, wanted, actor=ACTOR, reason="drill", report=_ignore)
        )

    def _act(self, action: Callable[[Store], admin.Result]) -> int:
        with admin.connect(lambda: self.dsn, pooler=False, check_schema=False) as store:
            return action(store).done

    @contextmanager
    def hold_open(self) -> Generator[list[str]]:
        """Place orders in a transaction that is committed at the end of this context; yield their uids."""
        with self._connect() as connection, connection.transaction():
            connection.execute("set local idle_in_transaction_session_timeout = 0")
            names = [f"late-{n}" for n in range(1, LATE_ORDERS + 1)]
            connection.cursor().executemany(LATE, [(name,) for name in names])
            yield _place(connection, names)

    def wait_for_standby(self, name: str) -> None:
        """Let commits wait for the standby `name` from now on."""
        with self._connect() as connection:
            for statement in SYNCHRONOUS:
                connection.execute(statement.format(name=name).encode())

    def is_synchronous(self, name: str) -> bool:
        """Return True if commits wait for the standby `name`, and it is there."""
        return bool(self._fetch(STREAMING, (name,)))

    @contextmanager
    def _shop(self) -> Generator[ShopDatabase]:
        shop = ShopDatabase(self.dsn)
        try:
            yield shop
        finally:
            shop.close()

    def _fetch(self, statement: str, parameters: Any = None, *, rows: bool = True) -> list[Any]:
        with self._connect() as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if rows else []

    @contextmanager
    def _connect(self, seconds: int = QUERY_SECONDS) -> Generator[Connection]:
        try:
            options = f"-c statement_timeout={seconds}s"
            with psycopg.connect(
                self.dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, options=options
            ) as connection:
                yield connection
        except psycopg.Error as error:
            raise ProcessFailed(f"a statement of the drill failed: {error}") from error


def _place(connection: Connection, customers: Sequence[str], **also: object) -> list[str]:
    """Place an order of each customer in the current transaction; `also` goes into the payloads. Return the uids."""
    taken = connection.execute(TAKE, (list(customers),)).fetchall()
    events = [
        outbox.Event("order.created", {"customer": name, "number": number, "emitted_at": time.time(), **also}, key=name)
        for name, number in taken
    ]
    uids = outbox.emit_many(connection, events)
    totals = ["1.00"] * len(taken)
    connection.execute(PLACE, ([name for name, _ in taken], [number for _, number in taken], totals, uids))
    return [str(uid) for uid in uids]


def _ignore(_count: int) -> None:
    """Show no progress."""
