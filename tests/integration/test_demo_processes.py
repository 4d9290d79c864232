"""The processes of the demo: the shop knows what it committed, both destinations record what arrives."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from confluent_kafka import Producer
from standardwebhooks.webhooks import Webhook

from outbox_relay.workbench.shop.arrivals import JournalWriter
from outbox_relay.workbench.shop.consumer import TopicReader
from outbox_relay.workbench.shop.orders import Shop, ShopDatabase
from outbox_relay.workbench.shop.receiver import PATH, VerifyingReceiver
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.wait import until

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
EVENT = {"customer": "customer-1", "number": 7, "total": "1.00", "emitted_at": 100.25}
BODY = json.dumps(EVENT)
UNREADABLE = ["", 0, "", 0.0, 0.0]
END_WRITERS = """
select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
"""
LOGGED = "select key, (convert_from(payload, 'UTF8')::jsonb ->> 'number')::bigint, uid::text from outbox.event"


def test_shop_knows_exactly_what_it_committed_though_it_lost_its_connections(database: Database) -> None:
    shop_database = ShopDatabase(database.dsn)
    shop_database.prepare()
    shop = Shop(database.dsn)
    working = threading.Thread(target=shop.run, daemon=True)
    working.start()
    until(lambda: shop_database.count() > 100, seconds=30, what="the shop emits")
    with database.connect(autocommit=True) as connection:
        connection.execute(END_WRITERS)
    until(lambda: shop_database.count() > 300 and shop.rolled_back, seconds=30, what="the shop emits and rolls back")
    shop.stop()
    working.join(30)
    assert not working.is_alive()
    committed, count = shop_database.committed(), shop_database.count()
    with database.connect() as connection:
        logged = connection.execute(LOGGED).fetchall()
    assert set(logged) == committed
    assert len(logged) == len(committed) == count
    of_one = sorted(number for key, number, _ in committed if key == next(iter(committed))[0])
    assert of_one == list(range(1, len(of_one) + 1))


async def test_receiver_accepts_signed_requests_only(tmp_path: Path) -> None:
    signed = signature(BODY)
    requests = [
        ({**signed, "outbox-key": "customer%2D1"}, BODY, 204),
        ({**signed, "outbox-key": "customer-1"}, BODY.replace("7", "8"), 401),
        ({"outbox-key": "customer-1"}, BODY, 401),
        (signed, BODY, 204),
        ({**signature("[]"), "outbox-key": "customer-1"}, "[]", 204),
    ]
    with JournalWriter(tmp_path / "journal") as journal:
        app = web.Application()
        app.add_routes([web.post(PATH, VerifyingReceiver(SECRET, journal, tmp_path / "broken").take)])
        async with TestClient(TestServer(app)) as client:
            for headers, body, status in requests:
                async with client.post(PATH, data=body, headers=headers) as answer:
                    assert answer.status == status
    first, *others = entries(tmp_path)
    assert first[:4] == ["customer-1", 7, "u1", 100.25]
    assert abs(first[4] - time.time()) < 60
    assert others == [None, None, UNREADABLE, UNREADABLE]


def entries(directory: Path) -> list[Any]:
    """Return the entries of a journal."""
    return [json.loads(line) for line in (directory / "journal").read_text().splitlines()]


def signature(body: str) -> dict[str, str]:
    """Return the headers with which the reference library accepts `body`."""
    now = datetime.now(UTC)
    text = Webhook(SECRET).sign("u1", now, body)
    return {"webhook-id": "u1", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": text}


@pytest.mark.slow  # starts a consumer process
def test_consumer_reads_to_the_end_when_it_is_stopped(kafka: KafkaBroker, tmp_path: Path) -> None:
    topic = f"demo.{uuid4().hex}"
    kafka.create_topic(topic, partitions=3)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(300):
        value = json.dumps({**EVENT, "number": number})
        producer.produce(topic, key=f"customer-{number % 7}", value=value, headers={"id": f"u{number}"})
    producer.produce(topic, key="customer-1", value="junk", headers={"id": "u"})
    assert producer.flush(30) == 0
    stopping = threading.Event()
    stopping.set()
    with JournalWriter(tmp_path / "journal") as journal:
        TopicReader(kafka.bootstrap, topic, journal).run(stopping)
    found = entries(tmp_path)
    assert found.count(UNREADABLE) == 1
    events = {(*entry[:4],) for entry in found if entry != UNREADABLE}
    assert events == {(f"customer-{n % 7}", n, f"u{n}", 100.25) for n in range(300)}
    assert len(found) == 301
