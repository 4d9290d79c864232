"""Connections to the database that are lost without a word: no FIN, no RST, and a kernel that goes on acknowledging."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.postgres.listener import LOCK
from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.support.database import Database, query
from tests.support.emitting import emit_payload
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_bodies
from tests.support.relay_config import webhook_with_files_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.wait import until

RECOVERED_SECONDS = 20
ASLEEP = "select 1 from pg_locks where locktype = 'advisory' and classid = %s and objid = %s and mode = 'ExclusiveLock'"


@pytest.fixture
def proxy(database: Database) -> Generator[Proxy]:
    """Yield a proxy in front of the database's server."""
    proxy = Proxy()
    proxy.target = database.server.port
    with proxy:
        yield proxy


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_relay_whose_connections_are_lost_without_a_word_delivers_again_by_itself(
    database: Database, proxy: Proxy, receiver: Receiver, tmp_path: Path
) -> None:
    """The one that listens is among them. New connections pass, then for a while none do."""
    dsn = make_conninfo(host=LOOPBACK, port=proxy.port, dbname=database.name, user="postgres")
    text = webhook_with_files_config(f'dsn = "{dsn}"', receiver.url, tmp_path).replace(
        "lease_seconds = 3", "lease_seconds = 15"
    )
    with RelayService(tmp_path, text, expects=LOST, CRM_TOKEN="x") as relay:
        emit_payload(database, "1", "a")
        until(lambda: b"1" in received_bodies(receiver), seconds=30, what="the first event arrives")
        until(lambda: query(database, ASLEEP, *LOCK), seconds=30, what="the relay sleeps and listens")
        lost = proxy.blackhole()
        began = time.monotonic()
        emit_payload(database, "2", "a")
        until(lambda: b"2" in received_bodies(receiver), seconds=RECOVERED_SECONDS, what="the second event arrives")
        sys.stdout.write(f"{lost} connections lost, delivered again after {time.monotonic() - began:.1f} s\n")
        until(lambda: relay.ready, seconds=RECOVERED_SECONDS, what="it is ready")
        emit_payload(database, "3", "a")
        until(lambda: b"3" in received_bodies(receiver), seconds=RECOVERED_SECONDS, what="the third event arrives")

        proxy.swallowing = True
        proxy.blackhole()
        until(lambda: not relay.ready, seconds=RECOVERED_SECONDS, what="/readyz says that the database is lost")
        assert relay.ask("/livez")[0] == 200
        emit_payload(database, "4", "a")
        proxy.swallowing = False
        began = time.monotonic()
        until(lambda: b"4" in received_bodies(receiver), seconds=RECOVERED_SECONDS, what="the fourth event arrives")
        until(lambda: relay.ready, seconds=RECOVERED_SECONDS, what="it is ready again")
        sys.stdout.write(f"delivered again {time.monotonic() - began:.1f} s after connections pass again\n")
        assert relay.process.poll() is None
        proxy.bury()
        assert relay.stop() == 0
    assert list(dict.fromkeys(received_bodies(receiver))) == [b"1", b"2", b"3", b"4"]
