"""docs/fastapi.md and its example: orders and their events, webhooks that are verified and handled once, the page."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from standardwebhooks import Webhook

from outbox_relay.workbench.embedded.ports import free_port
from tests.docs.pages import ROOT, blocks
from tests.support.database import Database, query
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import WEBHOOK_WITH_FILES
from tests.support.service import RelayService
from tests.support.wait import until

PAGE, EXAMPLE = "docs/fastapi.md", ROOT / "examples" / "fastapi_shop"
TOKEN = "of-the-staff"
UID = uuid.UUID(int=7)
BODY = b'{"id":1,"total":1250}'


@contextmanager
def shop(database: Database, log: Path) -> Generator[httpx.Client]:
    """Run the example as the page says, and yield a client of it."""
    with database.connect() as owner:
        owner.execute((EXAMPLE / "database.sql").read_bytes())
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "app:app", "--app-dir", str(EXAMPLE), "--port", str(port)]
    environment = {**os.environ, "DATABASE_URL": database.dsn, "WEBHOOK_SECRET": SECRET, "STAFF_TOKEN": TOKEN}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            until(lambda: answers(client, process), seconds=30, what="the example answers")
            yield client
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15), log.read_text()


def answers(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    """Return True if the example listens."""
    assert process.poll() is None, "the example has ended"
    try:
        return client.get("/outbox/").status_code == 401
    except httpx.ConnectError:
        return False


@pytest.fixture
def client(database: Database, tmp_path: Path) -> Generator[httpx.Client]:
    """Yield a client of the example, whose database is ``database``."""
    with shop(database, tmp_path / "shop.log") as found:
        yield found


def signed(body: bytes = BODY, uid: object = UID, secret: str = SECRET, age: float = 0) -> dict[str, str]:
    """Return the headers of a webhook."""
    sent = datetime.fromtimestamp(int(datetime.now(UTC).timestamp()), UTC) - timedelta(seconds=age)
    signature = Webhook(secret).sign(str(uid), sent, body.decode())
    stamp = str(int(sent.timestamp()))
    return {"webhook-id": str(uid), "webhook-timestamp": stamp, "webhook-signature": signature}


def test_the_blocks_of_the_page_are_parts_of_the_example() -> None:
    example = (EXAMPLE / "app.py").read_text(encoding="utf-8")
    parts = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert len(parts) == 6
    assert [part for part in parts if part not in example] == []


@pytest.mark.slow  # runs what a page shows
def test_an_order_comes_back_as_an_invoice(database: Database, client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text(SECRET)
    (tmp_path / "tenant").write_text("one")
    where = {"database": f'dsn = "{database.dsn}"', "url": f"{client.base_url}/webhooks", "directory": tmp_path}
    with RelayService(tmp_path, WEBHOOK_WITH_FILES.format(**where), CRM_TOKEN="t").start() as relay:
        answer = client.post("/orders", json={"total": 1250})
        assert (answer.status_code, answer.json()["total"]) == (201, 1250)
        invoices = "select order_id, total from invoices"
        until(lambda: query(database, invoices), seconds=30, what="the invoice is written")
        assert query(database, invoices) == [(answer.json()["id"], 1250)]
        assert query(database, "select event from invoices") == query(database, "select uid from outbox.event")
        assert relay.stop() == 0
    assert "Traceback" not in (tmp_path / "shop.log").read_text()


@pytest.mark.slow
def test_a_webhook_of_the_relay_has_its_effect_once(database: Database, client: httpx.Client) -> None:
    refused: list[tuple[dict[str, str], bytes, int]] = [
        ({}, BODY, 401),
        (signed(secret="whsec_" + "A" * 32), BODY, 401),
        (signed(age=1000), BODY, 401),
        (signed(), BODY + b" ", 401),
        (signed(), b"x" * (2 << 20), 413),
    ]
    for headers, body, status in refused:
        assert client.post("/webhooks", content=body, headers=headers).status_code == status, headers
    assert query(database, "select count(*) from invoices") == [(0,)]
    for _ in range(2):
        assert client.post("/webhooks", content=BODY, headers=signed()).status_code == 204
    assert query(database, "select event, order_id, total from invoices") == [(UID, 1, 1250)]
