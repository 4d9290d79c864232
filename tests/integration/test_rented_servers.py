"""Servers as they are rented: without MD5, position in the WAL or the cluster's identifier, and behind RDS Proxy."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from outbox_relay.postgres.migrations import migrate, rebase
from tests.support.command import Ended, inside, outbox_relay
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import running, spec

CONTROL = (
    "out pg_control_version integer, out catalog_version_no integer, out system_identifier bigint, "
    "out pg_control_last_modified timestamptz"
)
REFUSED = {
    "md5(text)": "md5(text) returns text",
    "md5(bytea)": "md5(bytea) returns text",
    "pg_control_system()": f"pg_control_system({CONTROL})",
    "pg_current_wal_lsn()": "pg_current_wal_lsn() returns pg_lsn",
    "pg_current_wal_insert_lsn()": "pg_current_wal_insert_lsn() returns pg_lsn",
    "pg_walfile_name(pg_lsn)": "pg_walfile_name(pg_lsn) returns text",
}
"""Signature → the head of the function that takes its place: what Aurora, Azure and servers in FIPS mode refuse."""
CODES = ["XX000", "0A000"]
"""OpenSSL without MD5; "not supported"."""
OPTIONS_REFUSED = [
    "unsupported startup parameter: options",
    'unsupported startup parameter in options: "jit"',
    "startup parameter options is not supported",
]
"""Refusals of startup options by other poolers."""
RDS = "Feature not supported: RDS Proxy currently doesn\N{RIGHT SINGLE QUOTATION MARK}t support command-line options."


def refuse(database: Database, code: str) -> None:
    """Let the server refuse what some do not have, in this database. A built-in function is known by its number."""
    with database.connect(autocommit=True) as admin:
        for signature, head in REFUSED.items():
            name = signature.partition("(")[0]
            admin.execute(f"alter function pg_catalog.{signature} rename to {name}_before".encode())
            admin.execute(
                f"create function pg_catalog.{head} language plpgsql as "
                f"$$ begin raise exception 'not here' using errcode = '{code}'; end $$".encode()
            )


def cluster(database: Database) -> int | None:
    """Return the cluster that the log belongs to."""
    [(found,)] = query(database, "select system_identifier from outbox.meta")
    return found


def relayed(database: Database) -> None:
    """Run a relay that delivers events."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["a", "b", None]))


def checked(database: Database, directory: Path) -> Ended:
    """Run ``check --online``."""
    with Receiver() as receiver:
        file = directory / "relay.toml"
        text = webhook_config(database.dsn, receiver, directory)
        file.write_text(text.replace("[relay]", f'pooler = "transaction"\nlisten_dsn = "{database.dsn}"\n[relay]'))
        for each in (file, directory / "secrets"):
            each.chmod(0o600)
        return inside("check", "--online", "-c", file)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("before", [True, False], ids=["before migrate", "after migrate"])
def test_everything_works_where_the_server_refuses(
    empty_database: Database, tmp_path: Path, code: str, *, before: bool
) -> None:
    database = empty_database
    if before:
        refuse(database, code)
        migrate(database.dsn)
        assert cluster(database) is None
    else:
        migrate(database.dsn)
        assert cluster(database) is not None
        refuse(database, code)
    relayed(database)
    ended = checked(database, tmp_path)
    assert ended.code == 0
    assert "database:" not in ended.err
    assert migrate(database.dsn).notes == ()
    relayed(database)
    query(database, "delete from outbox.relay returning 1")
    rebase(database.dsn)
    relayed(database)
    assert cluster(database) is None, "what is not told is not known"


# -- RDS Proxy ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[RDS, *OPTIONS_REFUSED], ids=lambda said: said[:20])
def proxy(request: pytest.FixtureRequest) -> Generator[tuple[int, str]]:
    """Yield the port of a server that refuses each connection as RDS Proxy does one with settings in its startup."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=_refuse, args=(listener, request.param), daemon=True).start()
        yield listener.getsockname()[1], request.param


def _refuse(listener: socket.socket, said: str) -> None:
    fields = {"S": "FATAL", "V": "FATAL", "C": "0A000", "M": said}
    body = b"".join(key.encode() + value.encode() + b"\0" for key, value in fields.items()) + b"\0"
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the test has ended
            return
        with connection:
            while struct.unpack("!ii", connection.recv(8))[1] in (80877103, 80877104):  # TLS, GSS
                connection.sendall(b"N")
            connection.recv(8192)
            connection.sendall(b"E" + struct.pack("!i", len(body) + 4) + body)


@pytest.mark.parametrize("command", [("run",), ("check", "--online")], ids=lambda command: command[0])
def test_a_proxy_that_refuses_settings_is_named_with_the_fix(
    proxy: tuple[int, str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    port, said = proxy
    with Receiver() as receiver:
        file = tmp_path / "relay.toml"
        file.write_text(webhook_config(f"postgresql://u:p@127.0.0.1:{port}/shop", receiver, tmp_path))
        for each in (file, tmp_path / "secrets"):
            each.chmod(0o600)
        ended = outbox_relay(*command, "-c", file)
    assert ended.code == 2
    assert said.partition(": ")[0] in ended.err
    assert 'set database.pooler = "transaction"' in ended.err.replace("\\", "")
