"""Handlers of a shop: one sends mail, one writes invoices in a transaction. See docs/python-handlers.md."""

from __future__ import annotations

import os
from pathlib import Path

import outbox_relay

OUTBOX = Path(os.environ.get("SHOP_MAILBOX", "/tmp/shop-mailbox"))  # noqa: S108 - an example


def send_mail(delivery: outbox_relay.Delivery) -> None:
    """Write a mail to a directory. Its name is the uid, so that a repeated delivery writes the same mail."""
    order = delivery.json()
    if "customer" not in order:
        raise outbox_relay.Dead("the order names no customer")
    OUTBOX.mkdir(exist_ok=True)
    (OUTBOX / str(delivery.uid)).write_text(f"Dear {order['customer']}, thank you for order {order['id']}.\n")


async def write_invoice(delivery: outbox_relay.Delivery) -> None:
    """Insert an invoice in the transaction of the delivery: once for each event, whatever crashes."""
    order = delivery.json()
    await delivery.connection.execute(
        "insert into invoices (event, total) values (%s, %s)", (delivery.uid, order["total"])
    )
