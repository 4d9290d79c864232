"""`outbox-relay dev`: its addresses, that data stay from one start to the next, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from outbox_relay import outbox
from tests.support.child_processes import END_SECONDS, ChildProcess, reachable
from tests.support.command import inside, outbox_relay
from tests.support.kafka.records import consume
from tests.support.ports import LOOPBACK, free_port
from tests.support.postgres import PostgresServer
from tests.support.relay_config import KAFKA
from tests.support.wait import until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka]

READY = "Ctrl-C stops everything"


@pytest.fixture
def place() -> Generator[Path]:
    """Yield a directory for the data of the environment and the output of the command."""
    with reachable() as place:
        yield place


class Dev(ChildProcess):
    """An environment that is ready, with its data in the directory `data`."""

    def __init__(self, place: Path, *options: str, kafka_port: int = 0) -> None:
        self.data = place / "data"
        super().__init__(place, "dev", *self.arguments(kafka_port), "--json", *options)
        try:
            self.says(READY)
            self.addresses: dict[str, str] = json.loads(self.out)
        except BaseException:
            self.close()
            raise

    def arguments(self, kafka_port: int = 0) -> list[str]:
        """Return its arguments, also for a second one in the same directory."""
        return ["--directory", str(self.data), "--postgres-port", "0", "--kafka-port", str(kafka_port)]

    def stop(self, number: signal.Signals) -> None:
        """Stop it: it ends with 0 and leaves no process and no temporary file."""
        self.process.send_signal(number)
        assert self.process.wait(END_SECONDS) == 0, self.err
        assert self.left() == []
        assert self.err.rstrip().endswith(f"the data of PostgreSQL are kept in {self.data}")


@pytest.mark.slow  # it starts a cluster and a broker twice
def test_data_stay_from_one_start_to_the_next_and_a_relay_delivers_to_the_broker(place: Path) -> None:
    dev = Dev(place)
    try:
        with psycopg.connect(dev.addresses["dsn"]) as connection:
            connection.execute("create table orders (id bigint)")
            assert inside("doctor", "--dsn", dev.addresses["dsn"]).out == "no problems found\n"
            uid = outbox.emit(connection, "order.created", {"id": 1}, key="order-1")
        second = outbox_relay("dev", *dev.arguments())
        assert (second.code, second.out) == (2, "")
        assert f"another outbox-relay dev, process {dev.process.pid}, uses the directory {dev.data}" in second.err
        dev.stop(signal.SIGINT)
    finally:
        dev.close()
    config, port = place / "relay.toml", free_port()
    config.write_text(KAFKA.format(dsn="", lease=3, topic="shop.{type}", bootstrap=f"{LOOPBACK}:{port}"))
    dev = Dev(place, "--config", str(config), kafka_port=port)
    try:
        with psycopg.connect(dev.addresses["dsn"]) as connection:
            assert connection.execute("select uid from outbox.event").fetchall() == [(uid,)]
            assert connection.execute("select to_regclass('orders') is not null").fetchone() == (True,)
        assert dev.addresses["bootstrap_servers"] == f"{LOOPBACK}:{port}"
        [record] = consume(dev.addresses["bootstrap_servers"], "shop.order.created", count=1)
        assert (record.key, record.headers["id"]) == (b"order-1", str(uid).encode())
        dev.stop(signal.SIGTERM)
    finally:
        dev.close()


@pytest.mark.slow  # it starts one cluster three times
def test_nothing_that_was_killed_prevents_the_next_start(place: Path, postgres: PostgresServer) -> None:
    killed = Dev(place)
    try:
        killed.process.kill()
        killed.process.wait(END_SECONDS)
        until(lambda: not killed.descendants(), seconds=END_SECONDS, what="its watchers end the servers")
        dev = Dev(place)
    finally:
        killed.close()
    try:
        [server] = dev.descendants("--unix_socket_directories=")
        os.kill(server, signal.SIGKILL)
        assert dev.process.wait(END_SECONDS) == 1
        assert "PostgreSQL ended by itself with" in dev.err
    finally:
        dev.close()
    # Another server has got the process id, and another run was killed while it made a cluster.
    (dev.data / "postgres/data/postmaster.pid").write_text(f"{postgres.process.pid}\n")
    (dev.data / "postgres/unfinished").mkdir()
    dev = Dev(place)
    try:
        dev.stop(signal.SIGINT)
    finally:
        dev.close()
