"""A flood of half-sent requests: the relay says that it lives, and webhooks flow."""

from __future__ import annotations

import http.client
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.emitting import emit_types
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

FILES = 1024
FLOOD = 2000
NEEDED_FILES = 2 * FLOOD + 500
PROBES = 30
HALF = b"GET /livez HTTP/1.1\r\nhost: x\r\nx-a: "


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@contextmanager
def open_files(soft: int, hard: int | None = None) -> Generator[None]:
    """Limit open files of this process, and of those that it starts meanwhile. Root may raise the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or max(soft, before[1])))
    except (ValueError, PermissionError):
        pytest.fail(f"needs {soft} open files, and the hard limit is {before[1]}: raise it with ulimit -Hn {soft}")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def flood(port: int) -> Generator[list[socket.socket]]:
    """Hold requests open whose heads never end."""
    held: list[socket.socket] = []
    try:
        for _ in range(FLOOD):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            held[-1].send(HALF)
        yield held
    finally:
        for each in held:
            each.close()


def answers_within_a_second(port: int) -> bool:
    """Return True if /livez answers a client that waits for a second."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def assert_alive(port: int) -> None:
    """Raise AssertionError unless /livez answers each probe within a second, as a supervisor asks."""
    answered = [answers_within_a_second(port) for _ in range(PROBES)]
    assert all(answered), f"{answered.count(False)} of {PROBES} probes had no answer within a second"


def test_half_open_requests_take_neither_health_nor_webhooks(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with open_files(NEEDED_FILES), RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path)) as relay:
        soft, hard = resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "it takes all the files that it may open"
        resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        with flood(relay.port):
            assert_alive(relay.port)
            emit_types(database, *(f"a.{n}" for n in range(50)))
            until(lambda: len(received_types(receiver)) >= 50, seconds=30, what="the webhooks flow")
            assert_alive(relay.port)
            assert len(list(Path(f"/proc/{relay.process.pid}/fd").iterdir())) < 300
            with flood(relay.port):
                assert_alive(relay.port)
        assert relay.stop() == 0
        text = relay.log.read_text()
    assert "Traceback" not in text
    assert len(text.splitlines()) < 50
    assert sorted(map(str, received_types(receiver))) == sorted(f"a.{n}" for n in range(50))
