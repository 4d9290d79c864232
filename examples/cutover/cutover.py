"""Move jobs from a table of an application's own to the outbox, without a job lost or done twice. See docs/queue.md."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg

import outbox_relay
from outbox_relay import inbox, outbox

CONSUMER = "invoices"


def order(conn: psycopg.Connection[Any], customer: str, total: int) -> UUID:
    """Ask for an invoice in the caller's transaction, of the old queue and of the outbox, with one uid."""
    uid = uuid4()
    conn.execute("insert into jobs (uid, customer, total) values (%s, %s, %s)", (uid, customer, total))
    outbox.emit(conn, "invoice.write", {"customer": customer, "total": total}, uid=uid)
    return uid


def old_worker(conn: psycopg.Connection[Any]) -> bool:
    """Do one job of the old queue. Return False if there is none."""
    with conn.transaction():
        claim = "delete from jobs where uid = (select uid from jobs limit 1 for update skip locked) returning *"
        job = conn.execute(claim).fetchone()
        if job is None:
            return False
        uid, customer, total = job
        if inbox.once(conn, CONSUMER, uid):
            _write(conn, uid, customer, total)
    return True


def watch(delivery: outbox_relay.Delivery) -> None:
    """Note that the event came, as the sink's handler while the old queue does the work."""
    delivery.connection.execute("insert into seen (uid) values (%s)", (delivery.uid,))


def rehearse(delivery: outbox_relay.Delivery) -> None:
    """Do the work, but keep the outcome apart from the invoices."""
    asked = delivery.json()
    delivery.connection.execute(
        "insert into rehearsed (uid, customer, total) values (%s, %s, %s)",
        (delivery.uid, asked["customer"], asked["total"]),
    )


def work(delivery: outbox_relay.Delivery) -> None:
    """Write the invoice, unless the old queue has."""
    asked = delivery.json()
    if inbox.once(delivery.connection, CONSUMER, delivery.uid):
        _write(delivery.connection, delivery.uid, asked["customer"], asked["total"])


def _write(conn: psycopg.Connection[Any], uid: UUID, customer: str, total: int) -> None:
    conn.execute("insert into invoices (uid, customer, total) values (%s, %s, %s)", (uid, customer, total))
