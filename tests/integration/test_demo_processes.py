"""The processes of the demo: the shop knows what it committed, both destinations record what arrives."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from confluent_kafka import Producer
from standardwebhooks.webhooks import Webhook

from outbox_relay.workbench.shop import orders
from outbox_relay.workbench.shop.consumer import TopicReader
from outbox_relay.workbench.shop.journal import REFUSED, UNREADABLE, Arrival, JournalReader, JournalWriter
from outbox_relay.workbench.shop.orders import Shop, ShopDatabase
from outbox_relay.workbench.shop.receiver import PATH, VerifyingReceiver
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.wait import until

SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
EVENT = {"customer": "customer-1", "number": 7, "total": "1.00", "emitted_at": 100.25}
BODY = json.dumps(EVENT)
END_LONG = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and state = 'idle in transaction' and state_change < now() - interval '0.3 s'
"""
LOGGED = "select key, (convert_from(payload, 'UTF8')::jsonb ->> 'number')::bigint, uid::text from outbox.event"


def test_shop_knows_exactly_what_it_committed(database: Database) -> None:
    shop_database = ShopDatabase(database.dsn)
    shop_database.prepare(events_per_second=2_000)
    shop = Shop(database.dsn)
    working = threading.Thread(target=shop.run, daemon=True)
    working.start()
    until(lambda: shop_database.count() > 500 and shop.rolled_back, seconds=30, what="the shop emits and rolls back")
    shop.stop()
    working.join(30)
    assert not working.is_alive()
    committed, count = shop_database.committed(), shop_database.count()
    shop_database.close()
    with database.connect() as connection:
        logged = connection.execute(LOGGED).fetchall()
    assert set(logged) == committed
    assert len(logged) == len(committed) == count
    of_one = sorted(number for key, number, _ in committed if key == next(iter(committed))[0])
    assert of_one == list(range(1, len(of_one) + 1))


def test_shop_continues_when_a_connection_is_lost_before_a_rollback(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ROLLBACK_SHARE", 1.0)
    shop_database = ShopDatabase(database.dsn)
    shop_database.prepare(events_per_second=50)
    shop = Shop(database.dsn, long_share=1.0, reconnects=True)
    working = threading.Thread(target=shop.run)
    working.start()
    with database.connect(autocommit=True) as connection:
        # The first writer waits in its transaction, which it then rolls back.
        until(lambda: connection.execute(END_LONG).rowcount, seconds=30, what="a long transaction's connection ends")
    shop_database.close()
    rolled_back = shop.rolled_back
    until(lambda: shop.rolled_back > rolled_back + 100, seconds=30, what="all writers go on")
    shop.stop()
    working.join(30)
    assert not working.is_alive()


def test_shop_obeys_its_emit_rate(database: Database) -> None:
    shop_database = ShopDatabase(database.dsn)
    shop_database.prepare(events_per_second=50)
    shop = Shop(database.dsn)
    working = threading.Thread(target=shop.run, daemon=True)
    working.start()
    until(lambda: shop.events_per_second == 50, seconds=10, what="the rate is read")
    shop_database.set_emit_rate(75)
    until(lambda: shop.events_per_second == 75, seconds=10, what="the new rate is read")
    shop.stop()
    working.join(30)
    shop_database.close()
    assert not working.is_alive()


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
        app.add_routes([web.post(PATH, VerifyingReceiver(SECRET, journal).take)])
        async with TestClient(TestServer(app)) as client:
            for headers, body, status in requests:
                async with client.post(PATH, data=body, headers=headers) as answer:
                    assert answer.status == status
    first, *others = JournalReader(tmp_path / "journal").read()
    assert first is not None
    assert first == Arrival("customer-1", 7, "u1", 100.25, first.arrived_at)
    assert abs(first.arrived_at - time.time()) < 60
    assert others == [REFUSED, REFUSED, UNREADABLE, UNREADABLE]


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
    found = JournalReader(tmp_path / "journal").read()
    assert found.count(UNREADABLE) == 1
    events = {(a.key, a.number, a.uid, a.emitted_at) for a in found if a and a != UNREADABLE}
    assert events == {(f"customer-{n % 7}", n, f"u{n}", 100.25) for n in range(300)}
    assert len(found) == 301
