"""The process with a webhook: what it refuses to start with, what SIGHUP changes, what becomes of a refused event."""

from __future__ import annotations

import base64
import resource
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.command import inside, outbox_relay
from tests.support.database import Database, query
from tests.support.emitting import emit_payload
from tests.support.ports import free_port
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.certificates import Authority
from tests.support.receiver.received import received_bodies
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_with_files_config
from tests.support.service import RelayService
from tests.support.wait import until

OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()
TOKEN = "hunter2-canary"
NO_MORE_FILES = 8
"""A limit of open files below the number of those that a relay has open. They stay open."""


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def relay_of(database: Database, receiver: Receiver, directory: Path) -> RelayService:
    """Return a relay that posts to the receiver."""
    text = webhook_with_files_config(f'dsn = "{database.dsn}"', receiver.url, directory)
    return RelayService(directory, text, CRM_TOKEN=TOKEN)


def test_an_event_that_is_refused_ends_dead_with_status_and_reason_and_its_neighbours_arrive(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    def answer(request: Request) -> Behaviour:
        return say(400, body=b"no such product") if request.body == b'"bad"' else say(204)

    receiver.answer = chosen(answer)
    with relay_of(database, receiver, tmp_path) as relay:
        _, bad, _, _ = (
            emit_payload(database, *event) for event in (("1", "a"), ('"bad"', "a"), ("2", "a"), ("3", "b"))
        )
        until(lambda: {b"2", b"3"} <= set(received_bodies(receiver)), seconds=30, what="the neighbours arrive")
        rows = "select state::text, last_status, last_error from outbox.delivery"
        until(lambda: query(database, rows), seconds=30, what="the refused event is a dead letter")
        assert query(database, rows) == [("dead", 400, "answered 400 Bad Request")]
        assert received_bodies(receiver).count(b'"bad"') == 1
        assert [body for body in received_bodies(receiver) if body != b"3"] == [b"1", b'"bad"', b"2"]
        why = outbox_relay("why", bad, "-c", relay.config)
        assert (why.code, "answered 400 Bad Request" in why.out) == (0, True)
        assert relay.stop() == 0
    assert receiver.unverified == []
    assert {request.header("authorization") for request in receiver.requests} == {TOKEN}


def test_secrets_and_headers_are_read_again_at_sighup_and_what_is_missing_changes_nothing(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.secrets = (SECRET, OTHER)
    with relay_of(database, receiver, tmp_path) as relay:
        emit_payload(database, "1", "a")
        until(lambda: len(receiver.requests) == 1, seconds=30, what="the first event arrives")
        (tmp_path / "secrets").write_text(f"whsec_{TOKEN}\n")
        (tmp_path / "tenant").write_text("two")
        relay.send(signal.SIGHUP)
        until(lambda: "nothing has changed" in relay.log.read_text(), seconds=20, what="the bad file is refused")
        assert f"sinks.crm: secrets[0]: {tmp_path}/secrets: is not standard base64" in relay.log.read_text()
        emit_payload(database, "2", "a")
        until(lambda: len(receiver.requests) == 2, seconds=30, what="the second event arrives as before")
        receiver.secrets = (OTHER,)
        (tmp_path / "secrets").write_text(OTHER)
        relay.send(signal.SIGHUP)
        until(lambda: "configuration reloaded" in relay.log.read_text(), seconds=20, what="the good file is taken")
        emit_payload(database, "3", "a")
        until(lambda: len(receiver.requests) == 3, seconds=30, what="the third event arrives")
        (tmp_path / "secrets").unlink()
        relay.send(signal.SIGHUP)
        until(lambda: "No such file" in relay.log.read_text(), seconds=20, what="the missing file is named")
        emit_payload(database, "4", "a")
        until(lambda: len(receiver.requests) == 4, seconds=30, what="the fourth event arrives")
        assert relay.stop() == 0
        text = relay.log.read_text()
    assert [request.problem for request in receiver.requests] == [None] * 4
    assert [request.header("x-tenant") for request in receiver.requests] == ["one", "one", "two", "two"]
    for canary in (TOKEN, SECRET.removeprefix("whsec_"), OTHER.removeprefix("whsec_")):
        assert canary not in text


@pytest.mark.parametrize("of_system", [False, True], ids=["ca_file", "SSL_CERT_FILE"])
def test_authorities_are_read_again_at_sighup(database: Database, tmp_path: Path, *, of_system: bool) -> None:
    """One that is added is trusted, and one that is removed no longer, not even over a connection that is open."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new, file = Authority(tmp_path / "old"), Authority(tmp_path / "new"), tmp_path / "authorities.pem"
    before = old.certificate_file.read_text()
    file.write_text(before)
    with Receiver(tls=new.good()) as receiver:
        text = webhook_with_files_config(f'dsn = "{database.dsn}"', receiver.url, tmp_path)
        text = text.replace("allow_http = true", "" if of_system else f'ca_file = "{file}"')
        environ = {"SSL_CERT_FILE": str(file)} if of_system else {}
        with RelayService(tmp_path, text, CRM_TOKEN=TOKEN, **environ) as relay:
            emit_payload(database, "1", "a")
            refused = "select 1 from outbox.sink where last_error like '%%certificate is not accepted%%'"
            until(lambda: query(database, refused), seconds=30, what="the certificate is refused")
            file.write_text(before + new.certificate_file.read_text())
            reload(relay)
            until(lambda: len(receiver.requests) == 1, seconds=30, what="the event arrives")
            file.write_text(before)
            query(database, "update outbox.sink set last_error = null, last_error_at = null returning 1")
            reload(relay)
            emit_payload(database, "2", "a")
            until(lambda: query(database, refused), seconds=30, what="the certificate is refused again")
            assert len(receiver.requests) == 1
            assert relay.stop() == 0


def reload(relay: RelayService) -> None:
    """Send SIGHUP, and wait until the relay has read its configuration again."""

    def times() -> int:
        return sum(line["event"] == "config.reloaded" for line in relay.lines())

    before = times()
    relay.send(signal.SIGHUP)
    until(lambda: times() > before, seconds=20, what="the configuration is reloaded")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("secrets", "secrets[0]: DIR/secrets: No such file or directory"),
        ("tenant", "headers.x-tenant: DIR/tenant: No such file or directory"),
        ("CRM_TOKEN", "headers.authorization: the variable CRM_TOKEN is not set"),
    ],
)
def test_check_says_what_of_its_secrets_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, said: str
) -> None:
    relay = tmp_path / "relay.toml"
    relay.write_text(
        webhook_with_files_config(f'dsn = "host=127.0.0.1 port={free_port()}"', "http://127.0.0.1:9/", tmp_path)
    )
    for file in ("secrets", "tenant"):
        (tmp_path / file).chmod(0o600)
    (tmp_path / missing).unlink(missing_ok=True)
    monkeypatch.setenv("CRM_TOKEN", TOKEN)
    monkeypatch.delenv(missing, raising=False)
    found = f"{relay}:6: sinks.crm: {said.replace('DIR', str(tmp_path))}\n"
    check = inside("check", "-c", relay)
    assert (check.code, check.err) == (0, f"warning: {found}")
    online = inside("check", "--online", "-c", relay)
    assert (online.code, found in online.err) == (2, True)


def test_a_relay_without_file_descriptors_counts_no_attempt_and_goes_on_when_it_has_some(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """The destination is not to blame: its circuit stays closed."""
    with relay_of(database, receiver, tmp_path) as relay:
        limits = resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE, (NO_MORE_FILES, limits[1]))
        for n in range(100):
            emit_payload(database, str(n), f"k{n % 30}")
        reason = "select 1 from outbox.delivery where last_error like '%%Too many open files%%'"
        until(lambda: query(database, reason), seconds=60, what="an event has an error")
        assert query(database, "select circuit from outbox.sink where name = 'crm'") == [("closed",)]
        assert query(database, "select count(*) from outbox.delivery where attempts > 0") == [(0,)]
        assert receiver.requests == []
        resource.prlimit(relay.process.pid, resource.RLIMIT_NOFILE, limits)
        until(lambda: len(receiver.requests) == 100, seconds=60, what="all events arrive")
        assert relay.stop() == 0
    by_key = [[int(body) for body in received_bodies(receiver) if int(body) % 30 == key] for key in range(30)]
    assert by_key == [list(range(key, 100, 30)) for key in range(30)]


class TestOwn:
    """The relay's own database and HTTP port are no destinations."""

    def test_database_is_not_dialled_when_only_a_file_names_it(self, database: Database, tmp_path: Path) -> None:
        [(port,)] = query(database, "select inet_server_port()")
        (tmp_path / "dsn").write_text(database.dsn)
        text = webhook_with_files_config(f'dsn_file = "{tmp_path}/dsn"', f"http://127.0.0.1:{port}/", tmp_path)
        (tmp_path / "relay.toml").write_text(text)
        check = inside("check", "--online", "-c", tmp_path / "relay.toml", CRM_TOKEN=TOKEN)
        assert check.code == 2
        assert "sinks.crm: ssrf_blocked: " in check.err
        assert "the relay's own" in check.err

    def test_http_port_is_not_dialled_under_any_address(self, database: Database, tmp_path: Path) -> None:
        """Neither by the address that it listens at nor by another one of this machine."""
        port = free_port()
        text = webhook_with_files_config(f'dsn = "{database.dsn}"', f"http://127.0.0.3:{port}/", tmp_path)
        (tmp_path / "relay.toml").write_text(f'{text}\n[http]\nlisten = "0.0.0.0:{port}"\n')
        check = inside("check", "-c", tmp_path / "relay.toml", CRM_TOKEN=TOKEN)
        assert check.code == 2
        assert "sinks.crm.url: leads to the relay's own HTTP port" in check.err
