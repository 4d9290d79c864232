"""Reasons why no connection is made: shown in libpq's words without the password, and the exit code of `run`."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import psycopg
import pytest

from outbox_relay.domain import files
from outbox_relay.postgres.dsn import find_authorities
from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.support.command import Ended, inside, outbox_relay
from tests.support.postgres import PostgresServer
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

PASSWORD = "s3cret-w0rd"
TLS_REQUEST, GSS_REQUEST = 80877103, 80877104


class TlsServer(NamedTuple):
    """A server with TLS: its port, and the authority that signed its certificate for `localhost`."""

    port: int
    authority: Authority


class _Front(socketserver.ThreadingTCPServer):
    """Speaks TLS with clients, and plainly with a server whose build may have none."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext, port: int) -> None:
        super().__init__((LOOPBACK, 0), _Passage)
        self.context, self.port = context, port


class _Passage(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        front = cast(_Front, self.server)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            client = stack.enter_context(contextlib.closing(self.request))
            first = client.recv(8)
            while first and (code := struct.unpack("!ii", first)[1]) in (TLS_REQUEST, GSS_REQUEST):
                client.sendall(b"S" if code == TLS_REQUEST else b"N")
                if code == TLS_REQUEST:
                    wrapped = front.context.wrap_socket(client, server_side=True)
                    client = stack.enter_context(contextlib.closing(wrapped))
                first = client.recv(8)
            there = stack.enter_context(socket.create_connection((LOOPBACK, front.port)))
            there.sendall(first)
            while True:
                if not (isinstance(client, ssl.SSLSocket) and client.pending()):
                    ready = select.select([client, there], [], [])[0]
                else:
                    ready = [client]
                for one, other in ((client, there), (there, client)):
                    if one in ready:
                        if not (data := one.recv(65_536)):
                            return
                        other.sendall(data)


@pytest.fixture(scope="module")
def tls_server(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[TlsServer]:
    """Yield a server that accepts TLS."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with _Front(authority.good("localhost"), postgres.port) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield TlsServer(front.server_address[1], authority)
        front.shutdown()


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def file(receiver: Receiver, tmp_path: Path) -> Path:
    """Return a configuration file, whose DSN a variable replaces."""
    file = tmp_path / "relay.toml"
    file.write_text(webhook_config("host=nowhere", receiver, tmp_path))
    for each in (file, tmp_path / "secrets"):
        each.chmod(0o600)
    return file


def checked(file: Path, dsn: str) -> Ended:
    """Run `check --online`."""
    ended = inside("check", "--online", "-c", file, OUTBOX_RELAY_DATABASE__DSN=dsn)
    assert PASSWORD not in ended.err
    return ended


def dsn_of(server: TlsServer, more: str, host: str = "localhost") -> str:
    """Return the connection string of the database `postgres` behind TLS."""
    return f"host={host} port={server.port} user=postgres dbname=postgres password={PASSWORD} {more}"


TLS_FAULTS = {
    "missing root": ("sslmode=verify-full sslrootcert=/nowhere/root.crt", 'file "/nowhere/root.crt" does not exist'),
    "no certificate": ("sslmode=verify-ca sslrootcert=/etc/hosts", 'could not read root certificate file "/etc/hosts"'),
    "untrusted": ("sslmode=verify-full sslrootcert={other}", "certificate verify failed"),
    "host name": ("sslmode=verify-full sslrootcert={ca} hostaddr=127.0.0.1", "does not match host name"),
    "key mode": ("sslmode=require sslcert={ca} sslkey={open}", 'private key file "{open}" has group or world access'),
    "no key": ("sslmode=require sslcert={ca} sslkey=/nowhere", 'not private key file "/nowhere"'),
    "sslmode": ("sslmode=nonsense", 'invalid sslmode value: "nonsense"'),
    "weak": ("sslmode=require sslrootcert=system", 'weak sslmode "require" may not be used with sslrootcert=system'),
    "channel binding": ("channel_binding=require", "channel binding required"),
}


@pytest.mark.parametrize("fault", TLS_FAULTS)
def test_a_fault_of_tls_is_told(tls_server: TlsServer, file: Path, tmp_path: Path, fault: str) -> None:
    other, key = tmp_path / "other", tmp_path / "open.key"
    other.mkdir()
    key.write_text("a key")
    key.chmod(0o644)
    names = {
        "ca": tls_server.authority.certificate_file,
        "other": Authority(other).certificate_file,
        "open": key,
    }
    more, said = (text.format(**names) for text in TLS_FAULTS[fault])
    ended = checked(file, dsn_of(tls_server, more, "elsewhere.test" if fault == "host name" else "localhost"))
    assert ended.code == 2
    assert said in ended.err


def test_the_authorities_of_the_system_are_found(
    tls_server: TlsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "PGSSLROOTCERT"):
        monkeypatch.delenv(name, raising=False)
    dsn = dsn_of(tls_server, "sslrootcert=system")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None))
    monkeypatch.setattr(files, "AUTHORITIES", (str(tmp_path), str(tls_server.authority.certificate_file)))
    find_authorities(dsn.replace("sslrootcert=system", ""))
    assert "SSL_CERT_FILE" not in os.environ
    monkeypatch.setenv("SSL_CERT_FILE", "")  # taken back at the end of the test
    find_authorities(dsn)
    psycopg.connect(dsn).close()
    monkeypatch.setenv("SSL_CERT_FILE", "/own")
    find_authorities(dsn)
    assert os.environ["SSL_CERT_FILE"] == "/own"


def test_a_part_of_the_password_in_a_wrong_place_is_not_told(file: Path) -> None:
    for dsn in (
        f"postgresql://u:p@{PASSWORD}@localhost/db",
        f"postgresql://u:1/{PASSWORD}@localhost/db",
        f"postgresql://u:{PASSWORD}/x@localhost/db",
    ):
        ended = checked(file, dsn)
        assert (ended.code, "write postgresql://" in ended.err) == (2, True)


# -- the start of a relay -------------------------------------------------------------------------------------------

REFUSED = {
    "password": ("user=guarded dbname=postgres", "password authentication failed"),
    "role": ("user=nobody dbname=postgres", 'role "nobody" does not exist'),
    "database": ("user=postgres dbname=nowhere", 'database "nowhere" does not exist'),
    "rule": ("user=barred dbname=postgres", "pg_hba.conf rejects connection"),
    "option": ("user=postgres dbname=postgres options='-c nonsense=1'", 'parameter "nonsense"'),
    "tls": ("user=postgres dbname=postgres sslmode=require", "does not support SSL"),
}


def test_a_fault_that_waiting_does_not_mend_ends_a_start(own_postgres: PostgresServer, file: Path) -> None:
    with own_postgres.connect() as admin:
        admin.execute("create role guarded login password 'right'")
    rules = own_postgres.data / "pg_hba.conf"
    rules.write_text(f"host all barred 127.0.0.1/32 reject\n{rules.read_text()}")
    own_postgres.require_password("guarded")
    for fault, (more, said) in REFUSED.items():
        dsn = f"host=127.0.0.1 port={own_postgres.port} password={PASSWORD} {more}"
        if fault in ("password", "rule"):  # once the server has read its rules again
            until(lambda dsn=dsn: _is_refused(dsn), seconds=10, what=f"{fault} is refused")
        ended = outbox_relay("run", "-c", file, OUTBOX_RELAY_DATABASE__DSN=dsn)
        assert (fault, ended.code) == (fault, 2)
        assert said in ended.err.replace("\\", "")
        assert PASSWORD not in ended.err


def _is_refused(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return True
    return False


def test_a_server_that_is_not_reachable_is_waited_for(receiver: Receiver, tmp_path: Path) -> None:
    service = RelayService(tmp_path, webhook_config("host=127.0.0.1 port=1 dbname=x", receiver, tmp_path))
    with service.start(wait=False):
        until(lambda: service.log.exists() and _unreachable(service), seconds=30, what="it tells why it waits")
        [line, *_] = _unreachable(service)
        assert "Connection refused" in line["reason"]
        assert line["again_in_seconds"] >= 0


def _unreachable(service: RelayService) -> list[dict[str, Any]]:
    return [line for line in service.lines() if line.get("event") == "database.unreachable"]
