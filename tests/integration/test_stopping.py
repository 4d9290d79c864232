"""SIGTERM while there is nothing to drain into: positions stand still, so nothing is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.database import Database, query
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.relay_config import kafka_and_webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

BACKLOG = """select count(outbox.emit('order.created', to_jsonb(n), key => 'k' || mod(n, 5000)))
from generate_series(1, %s) n"""
OPEN = "select count(*) from outbox.sink where circuit <> 'closed'"
OWNED = "select count(*) from outbox.shard where owner is not null"


@pytest.mark.parametrize("fault", [pytest.param("refused", marks=pytest.mark.slow), "silent"])
def test_a_relay_whose_destinations_are_both_down_releases_everything_and_ends(
    database: Database, topic: str, tmp_path: Path, fault: str
) -> None:
    """With more waiting than is ever in hand. Goes red when shards are released only once there is room for more."""
    with Proxy() as proxy, database.connect() as connection:
        proxy.swallowing = True
        port = proxy.port if fault == "silent" else free_port()
        connection.execute(BACKLOG, (25_000,))
        connection.commit()
        text = kafka_and_webhook_config(database.dsn, f"127.0.0.1:{port}", topic, f"http://127.0.0.1:{port}/hooks")
        with RelayService(tmp_path, text) as relay:
            until(lambda: query(database, OPEN) == [(2,)], seconds=90, what="both circuits are open")
            until(lambda: _in_hand(relay, "events") >= 20_000, seconds=60, what="no more is read")
            assert relay.stop() == 0
            said = {line["event"] for line in relay.lines() if "event" in line}
    assert "stopped before everything in hand was settled" not in said, "its limit has not passed"
    assert {"relay.stopping", "shards.released", "relay.stopped"} <= said
    assert query(database, OWNED) == [(0,)]
    assert query(database, "select count(*) from outbox.relay") == [(0,)]
    assert query(database, "select count(*) from outbox.delivery where lease is not null") == [(0,)]


def _in_hand(relay: RelayService, sink: str) -> int:
    _, body = relay.ask("/readyz")
    return body["sinks"][sink]["in_hand"] if body else -1
