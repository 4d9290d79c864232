"""A relay whose memory does not suffice for one event: the event is dead or delivered, and the others flow."""

import resource
from pathlib import Path

import pytest

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

CEILING = 64 << 20
PAYLOAD = b'"' + b"x" * (60 << 20) + b'"'
ROOM = 48 << 20
"""Address space beyond that of the idle relay, less than the payload has bytes."""


def limit_memory(process: int) -> None:
    """Let a process have little more address space than it has now."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    [size] = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize:")]
    resource.prlimit(process, resource.RLIMIT_AS, (size + ROOM, size + ROOM))


@pytest.mark.slow
def test_an_event_for_which_there_is_no_memory_stops_no_other(database: Database, tmp_path: Path) -> None:
    """Goes red when the connection that libpq gives up counts as lost: every session would restart without end."""
    migrate(database.dsn, max_payload_bytes=CEILING)
    gone = "select last_error from outbox.delivery where state = 'dead'"
    with (
        Receiver() as receiver,
        RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path)) as relay,
    ):
        emit_types(database, "a.first")
        until(lambda: received_types(receiver) == ["a.first"], seconds=30, what="it delivers")
        limit_memory(relay.process.pid)
        with database.connect() as connection:
            outbox.emit(connection, "a.small", 1)
            outbox.emit(connection, "a.huge", PAYLOAD, content_type="application/json")
            outbox.emit(connection, "a.neighbour", 1)
        until(lambda: {"a.small", "a.neighbour"} <= {*received_types(receiver)}, seconds=60, what="neighbours arrive")
        until(
            lambda: query(database, gone) or "a.huge" in received_types(receiver), seconds=60, what="dead or delivered"
        )
        assert all("ran out of memory" in said for (said,) in query(database, gone))
        emit_types(database, "a.late")
        until(lambda: "a.late" in received_types(receiver), seconds=30, what="it goes on")
        assert relay.stop() == 0
