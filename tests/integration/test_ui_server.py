"""The options of the page: what is refused, and a process that serves it."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.ui import server
from outbox_relay.ui.server import Serving, access_of
from outbox_relay.ui.users import User, verify_password
from tests.support.command import inside
from tests.support.database import Database
from tests.support.page import served

LOOPBACK, ANYWHERE = ("127.0.0.1", 8090), ("192.0.2.1", 8090)
USERS = Path("users")
PROXIES = {"proxy_header": "X-User", "trusted_proxies": "10.0.0.0/8"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": ANYWHERE, "auth": "none"}, "would open the page to every client"),
        ({"auth": "basic"}, "needs --users FILE"),
        ({"auth": "proxy"}, "needs --proxy-header and --trusted-proxies"),
        ({"auth": "proxy", "proxy_header": "X-User"}, "needs --proxy-header and --trusted-proxies"),
        ({"address": ANYWHERE, "auth": "proxy", **PROXIES, "proxy_header": "X User"}, "is no name of a header"),
        ({"address": ANYWHERE, "auth": "proxy", **PROXIES, "proxy_header": "X-User:"}, "is no name of a header"),
        ({"address": ANYWHERE, "auth": "proxy", **PROXIES, "proxy_header": "Authorization"}, "is no name of a header"),
        (
            {"address": ANYWHERE, "auth": "proxy", **PROXIES, "trusted_proxies": "::/0"},
            "let every client name its user",
        ),
        ({"auth": "basic", "users": USERS, **PROXIES}, "are for --auth proxy"),
        ({"auth": "none", "users": USERS}, "--users is for --auth basic or proxy"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"address": LOOPBACK, **options}
    with pytest.raises(ConfigurationError, match=said):
        access_of(Serving(**given))


def test_a_line_of_the_users_file_is_printed() -> None:
    ended = inside("ui-user", "anna", "operator", stdin=b"correct horse battery\n")
    name, role, stored = ended.out.strip().split(":")
    assert (ended.code, name, role) == (0, "anna", "operator")
    assert verify_password("correct horse battery", stored)
    for arguments, password in ((("a:b", "viewer"), "long enough it is"), (("anna", "viewer"), "short")):
        refused = inside("ui-user", *arguments, stdin=password.encode())
        assert (refused.code, refused.out) == (2, "")
        assert password not in refused.err


@contextmanager
def serving(*options: str, listen: str = "127.0.0.1:0") -> Generator[tuple[subprocess.Popen[str], int]]:
    """Serve the page in a process, and return it with its port."""
    command = [
        sys.executable,
        "-m",
        "outbox_relay",
        "ui",
        "--dsn",
        "host=/nowhere",
        "--listen",
        listen,
        *options,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().strip().rstrip("/").rpartition(":")[2])
        finally:
            process.kill()


def answered(port: int, path: str, host_address: str = "127.0.0.1", **headers: str) -> tuple[int, str]:
    """Return the status and the content of an answer."""
    connection = http.client.HTTPConnection(host_address, port, timeout=30)
    with closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_every_address_is_of_both_families(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(inside("ui-user", "anna", "operator", stdin=b"correct horse battery\n").out)
    users.chmod(0o600)
    with serving("--auth", "basic", "--users", str(users), listen="[::]:0") as (_, port):
        for host in ("127.0.0.1", "::1"):
            assert answered(port, "/", host)[0] == 401


def test_a_process_serves_the_page_until_a_signal_and_needs_no_database_to_start() -> None:
    with serving() as (process, port):
        assert answered(port, "/static/page.css")[0] == 200
        status, page = answered(port, "/")
        assert (status, "No answer from the database" in page) == (503, True)
        assert answered(port, "/", host="evil.example")[0] == 421
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize("path", ["outbox", "//outbox", "/a/../b", "/.", "/a b", "/ä", "/a?b", '/"onload=', "/a\n"])
def test_a_root_path_that_is_none_is_refused(path: str) -> None:
    ended = inside("ui", "--dsn", "host=/nowhere", "--root-path", path)
    assert (ended.code, "--root-path: should be a path of letters" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: 127", b"GET /static/page.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET"],
    ids=["nothing", "a part of a head", "a part of the next head"],
)
def test_a_connection_without_a_request_under_way_is_closed(
    database: Database, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """uvicorn waits for the first request, and for the rest of a head, without a limit."""
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(server, "WATCH_SECONDS", 0.05)
    with served(database, User("anna", "operator")) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(sent)
            while connection.recv(1 << 16):
                pass
