"""The example of handlers: one that writes mails, and one that writes invoices in a transaction."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.database import Database, query
from tests.support.emitting import emit_payload
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.mail]
type = "python"
handler = "examples.handlers.shop_handlers:send_mail"
[sinks.billing]
type = "python"
handler = "examples.handlers.shop_handlers:write_invoice"
dsn = "{dsn}"
transaction = true
[routes]
"order.*" = ["mail", "billing"]
"""


def test_an_order_has_one_mail_and_one_invoice(database: Database, tmp_path: Path) -> None:
    with database.connect() as connection:
        connection.execute("create table invoices (event uuid, total integer)")
    mails = tmp_path / "mails"
    text = CONFIG.format(dsn=database.dsn)
    with RelayService(tmp_path, text, SHOP_MAILBOX=str(mails)) as relay:
        uid = emit_payload(database, json.dumps({"id": 1, "customer": "Ada", "total": 1250}), "order-1")
        invoices = "select event::text, total from invoices"
        until(lambda: query(database, invoices) == [(uid, 1250)], seconds=60, what="the invoice is written")
        until((mails / uid).exists, seconds=60, what="the mail is written")
        until((mails / uid).read_text, seconds=60, what="its text")
        assert (mails / uid).read_text() == "Dear Ada, thank you for order 1.\n"
        assert relay.stop() == 0
