"""SIGHUP of the whole process: while the database is away, when its answer is lost, when it asks for too much."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.postgres.store import Store
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority
from tests.support.receiver.received import received_types
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_config, webhook_with_files_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.serving import serve_while
from tests.support.wait import until

MORE = ('"a.*" =', '"b.*" = ["crm"]\n"a.*" =')
REFUSED = "config.reload_refused"
RESTART = "config.restart_needed"
RELOADED = "config.reloaded"


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def events(relay: RelayService) -> list[str]:
    """Return the events of its log lines."""
    return [line["event"] for line in relay.lines() if "event" in line]


def rewrite(relay: RelayService, *replaced: tuple[str, str]) -> None:
    """Change the relay's file, and send it SIGHUP."""
    text = relay.config.read_text()
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    relay.config.write_text(text)
    relay.send(signal.SIGHUP)


def blocks_hangups(process: int) -> bool:
    """Return True if SIGHUP would stay pending in a process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    mask = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) & 1 << (signal.SIGHUP - 1))


def test_a_sighup_during_the_start_is_carried_out_after_it(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    config = tmp_path / "relay.toml"
    config.write_text(webhook_config(database.dsn, receiver, tmp_path), encoding="utf-8")
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen([sys.executable, "-m", "outbox_relay", "run", "-c", config], stdout=log, stderr=log)
        try:
            until(lambda: blocks_hangups(started.pid), seconds=20, what="the command has begun")
            started.send_signal(signal.SIGHUP)
            until(lambda: RELOADED in (tmp_path / "log").read_text(), seconds=20, what="the reload is carried out")
            assert started.poll() is None
            loaded = Path(f"/proc/{started.pid}/maps").read_text(encoding="utf-8")
            assert "confluent_kafka" not in loaded, "a reload loads no client of a destination that there is not"
            started.terminate()
            assert started.wait(30) == 0
        finally:
            started.kill()
            started.wait()


@pytest.mark.slow
def test_a_sighup_while_the_database_is_away_is_carried_out_when_it_is_back(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """Goes red when what was read is forgotten with the first call that fails."""
    [(port,)] = query(database, "select inet_server_port()")
    with Proxy() as proxy:
        proxy.target = port
        dsn = database.dsn.replace(f"port={port}", f"port={proxy.port}").replace(f":{port}/", f":{proxy.port}/")
        assert str(proxy.port) in dsn
        expects = {"reload", *LOST}
        with RelayService(tmp_path, webhook_config(dsn, receiver, tmp_path), expects=expects) as relay:
            emit_types(database, "a.one")
            until(lambda: received_types(receiver) == ["a.one"], seconds=30, what="the routed type arrives")
            proxy.cut()
            rewrite(relay, MORE)
            until(lambda: "config.reload_pending" in events(relay), seconds=40, what="it waits")
            assert RELOADED not in events(relay)
            assert relay.ask("/readyz")[1]["config_last_reload_successful"] is False
            proxy.restore()
            until(lambda: RELOADED in events(relay), seconds=40, what="it is carried out")
            assert relay.ask("/readyz")[1]["config_last_reload_successful"] is True
            patterns = "select 1 from outbox.sink where patterns = '{a.*,b.*}'"
            until(lambda: query(database, patterns), seconds=20, what="the database knows")
            emit_types(database, "b.late")
            until(lambda: "b.late" in received_types(receiver), seconds=30, what="the new type arrives")
            assert relay.stop() == 0
    assert set(received_types(receiver)) == {"a.one", "b.late"}
    assert REFUSED not in events(relay)


def test_what_needs_a_restart_is_named_and_everything_else_is_applied(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"}) as relay:
        emit_types(database, "a.one")
        until(lambda: len(receiver.requests) == 1, seconds=30, what="it delivers")
        rewrite(relay, ("lease_seconds = 3", "lease_seconds = 4"), MORE, ('"one"', '"two"'))
        until(lambda: RELOADED in events(relay), seconds=20, what="it is reloaded")
        [line] = [line for line in relay.lines() if line.get("event") == RELOADED]
        assert line["needs_restart"] == ["relay.lease_seconds"]
        assert line["applied"] == ["sinks.crm.headers.x-tenant.text", "routes"]
        assert SECRET not in relay.log.read_text()
        emit_types(database, "b.one")
        until(lambda: "b.one" in received_types(receiver), seconds=30, what="the new type arrives")
        assert receiver.requests[-1].header("x-tenant") == "two"
        relay.send(signal.SIGHUP)
        until(lambda: RESTART in events(relay), seconds=20, what="the rest is named again")
        [said] = [line["reason"] for line in relay.lines() if line.get("event") == RESTART]
        assert said.endswith("relay.lease_seconds: needs a restart")
        assert relay.stop() == 0


def test_another_set_of_sinks_is_refused_and_nothing_is_half_applied(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"}) as relay:
        emit_types(database, "a.one")
        until(lambda: len(receiver.requests) == 1, seconds=30, what="it delivers")
        rewrite(relay, ("sinks.crm", "sinks.erp"), ('["crm"]', '["erp"]'), ('"a.*"', '"b.*"'), ('"one"', '"two"'))
        until(lambda: RESTART in events(relay), seconds=20, what="it is refused")
        [(level, said)] = [(line["level"], line["reason"]) for line in relay.lines() if line.get("event") == RESTART]
        assert level == "warning", "the file is right"
        assert "sinks.erp: was added: needs a restart" in said
        assert relay.ask("/readyz")[1]["config_last_reload_successful"] is False
        assert query(database, "select name, patterns from outbox.sink") == [("crm", ["a.*"])]
        emit_types(database, "a.two")
        until(lambda: len(receiver.requests) == 2, seconds=30, what="it delivers as before")
        assert {request.header("x-tenant") for request in receiver.requests} == {"one"}
        assert relay.stop() == 0


def test_a_rotated_secret_is_named_by_its_place(database: Database, receiver: Receiver, tmp_path: Path) -> None:
    """The contents of a file are no setting of their own: the line is the only sign that the right one was edited."""
    secrets, tenant, other = tmp_path / "secrets", tmp_path / "tenant", tmp_path / "other"
    text = webhook_with_files_config(f'dsn = "{database.dsn}"', receiver.url, tmp_path)
    new = "whsec_" + base64.b64encode(b"x" * 32).decode()
    with RelayService(tmp_path, text, expects={"reload"}, CRM_TOKEN="token") as relay:
        for file, content, named in (
            (secrets, new, ["sinks.crm.secrets[0].secret"]),
            (other, new, []),
            (tenant, "two", ["sinks.crm.headers.x-tenant"]),
            (secrets, new, []),
            (secrets, "nonsense", None),
            (secrets, SECRET, ["sinks.crm.secrets[0].secret"]),
        ):
            before = len(_reloads(relay))
            file.write_text(content)
            relay.send(signal.SIGHUP)
            until(lambda before=before: len(_reloads(relay)) > before, seconds=20, what=f"{file.name} was read")
            assert _reloads(relay)[-1] == named
            until(lambda n=named: _refusals(database) == (n is None), seconds=20, what="doctor says whether it was")
        assert relay.stop() == 0
    assert new not in relay.log.read_text()


def _refusals(database: Database) -> int:
    """Return the number of relays whose newest reload was refused, as doctor says."""
    findings = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
    found = [each for each in findings if each["id"] == "config-reload-failed"]
    assert all("secrets: " in each["evidence"] for each in found)
    return len(found)


def _reloads(relay: RelayService) -> list[Any]:
    """Return what each reload has applied, None for one that was refused."""
    return [line.get("applied") for line in relay.lines() if line.get("event") in (RELOADED, REFUSED)]


def test_limits_and_another_destination_are_applied_and_no_request_is_repeated(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with (
        Receiver() as other,
        RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"}) as relay,
    ):
        for n in range(20):
            emit_types(database, f"a.{n}")
        until(lambda: receiver.requests, seconds=30, what="it delivers")
        changes = ("[sinks.crm]", '[sinks.crm]\norder = "none"\nmax_in_flight = 3\ntimeout_seconds = 7')
        rewrite(
            relay,
            changes,
            (receiver.url, other.url),
            ("lease_seconds = 3", "lease_seconds = 3\nstop_after_seconds = 19"),
        )
        until(lambda: RELOADED in events(relay), seconds=20, what="it is reloaded")
        until(lambda: in_flight_limit(relay) == 3, seconds=20, what="the limit is in force")
        for n in range(20):
            emit_types(database, f"a.late.{n}")
        until(lambda: "a.late.19" in received_types(other), seconds=30, what="the new destination receives events")
        assert relay.stop() == 0
    arrived = [*received_types(receiver), *received_types(other)]
    assert sorted(map(str, arrived)) == sorted([*(f"a.{n}" for n in range(20)), *(f"a.late.{n}" for n in range(20))])


OTHER_TYPE = """type = "kafka"
topic = "t"
producer = { "bootstrap.servers" = "127.0.0.1:PORT" }
[routes]"""


@pytest.mark.slow  # starts a relay process
def test_another_type_of_a_sink_is_applied_and_so_is_the_way_back(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """Goes red when the new webhook is unknown to those that have credentials: the process would end."""
    text = webhook_config(database.dsn, receiver, tmp_path)
    webhook = text[text.index('type = "webhook"') : text.index("[routes]") + len("[routes]")]
    kafka = OTHER_TYPE.replace("PORT", str(free_port()))
    with RelayService(tmp_path, text.replace(webhook, kafka), expects={"reload", "handed_over"}) as relay:
        emit_types(database, "a.one")
        until(lambda: circuit(relay) == "open", seconds=30, what="the broker does not answer")
        rewrite(relay, (kafka, webhook))
        until(lambda: RELOADED in events(relay), seconds=20, what="the other type is applied")
        until(lambda: received_types(receiver) == ["a.one"], seconds=30, what="the event that waited arrives")
        rewrite(relay, (webhook, kafka))
        until(lambda: events(relay).count(RELOADED) == 2, seconds=20, what="the first type is applied again")
        emit_types(database, "a.two")
        until(lambda: circuit(relay) == "open", seconds=30, what="the broker does not answer")
        for line in (line for line in relay.lines() if line.get("event") == RELOADED):
            assert ("sinks.crm.type" in line["applied"], line["needs_restart"]) == (True, [])
        assert relay.stop() == 0
    assert received_types(receiver) == ["a.one"]
    assert REFUSED not in events(relay)


def circuit(relay: RelayService) -> str:
    """Return the state of the sink's circuit that the relay shows."""
    return relay.ask("/readyz")[1]["sinks"]["crm"]["circuit"]


def in_flight_limit(relay: RelayService) -> int:
    """Return the limit of concurrent requests that the relay shows."""
    return relay.ask("/readyz")[1]["sinks"]["crm"]["in_flight_limit"]


def test_a_sink_that_was_removed_is_not_registered_again_by_a_reload(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"lease_lost"}) as relay:
        query(database, "select outbox.drop_sink('crm', true, 1000, null, null)")
        rewrite(relay, MORE)
        until(lambda: REFUSED in events(relay), seconds=20, what="it is refused")
        [said] = [line["reason"] for line in relay.lines() if line.get("event") == REFUSED]
        assert said.startswith("sinks.crm: was removed from the database")
        assert query(database, "select count(*) from outbox.sink") == [(0,)]
        assert relay.stop() == 0


@pytest.mark.parametrize(
    "removal", ["outbox.drop_sink('erp', true, 1000, null, null)", "outbox.drop_sink('erp', false, 1000, null, null)"]
)
def test_a_removed_sink_does_not_prevent_the_changes_of_the_others(
    database: Database, receiver: Receiver, tmp_path: Path, removal: str
) -> None:
    """Goes red when a reload with a removed sink is refused: the relay would need a restart for any change."""
    text = webhook_config(database.dsn, receiver, tmp_path)
    crm = text[text.index("[sinks.crm]") : text.index("[routes]")]
    text = text.replace("[routes]", crm.replace("crm]", "erp]") + "[routes]").replace('["crm"]', '["crm", "erp"]')
    with RelayService(tmp_path, text, expects={"reload", "lease_lost"}) as relay:
        until(lambda: query(database, "select count(*) from outbox.sink") == [(2,)], seconds=30, what="both are there")
        query(database, f"select {removal}")
        new = '"a.*" = ["crm", "erp"]\n"b.*" = ["crm", "erp"]'
        rewrite(relay, ('"a.*" = ["crm", "erp"]', new), ('"one"', '"two"'))
        until(lambda: RELOADED in events(relay), seconds=20, what="it is reloaded")
        [line] = [line for line in relay.lines() if line.get("event") == RELOADED]
        assert line["applied"] == ["sinks.crm.headers.x-tenant.text", "routes"]
        [left] = line["not_applied"]
        assert left.startswith("sinks.erp: was removed from the database")
        until(lambda: relay.ask("/readyz")[1]["sinks"]["erp"]["fault"], seconds=20, what="the relay finds it removed")
        emit_types(database, "b.one")
        until(lambda: received_types(receiver) == ["b.one"], seconds=30, what="the new type arrives")
        assert receiver.requests[-1].header("x-tenant") == "two"
        assert query(database, "select name, patterns from outbox.sink") == [("crm", ["a.*", "b.*"])]
        relay.send(signal.SIGHUP)
        until(lambda: events(relay).count(RELOADED) == 2, seconds=20, what="what was not applied is named again")
        assert [line["not_applied"] for line in relay.lines() if line.get("event") == RELOADED] == [[left]] * 2
        assert relay.stop() == 0


WAITING = """select 1 from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and query like '%%register_sinks%%'"""


@pytest.mark.fence("a reload fails halfway and leaves half of its settings in force")
def test_a_file_that_goes_bad_while_the_database_takes_a_reload_leaves_it_whole(
    database: Database, tmp_path: Path
) -> None:
    """The settings that were read apply: else this relay would give its sinks up to an unknown generation."""
    authority = Authority(tmp_path)
    certificate, private = authority.client_files()
    files = f'client_certificate = "{certificate}"\nclient_key = "{private}"\nca_file = "{authority.certificate_file}"'
    with Receiver(tls=authority.asks_for_certificate()) as receiver:
        text = webhook_config(database.dsn, receiver, tmp_path).replace("allow_http = true", files)
        with RelayService(tmp_path, text, expects={"reload"}) as relay:
            emit_types(database, "a.one")
            until(lambda: received_types(receiver) == ["a.one"], seconds=30, what="the routed type arrives")
            with database.connect() as connection:
                connection.execute("lock table outbox.sink in exclusive mode")
                rewrite(relay, MORE, ('"one"', '"two"'))
                until(lambda: query(database, WAITING), seconds=20, what="the database is to take the reload")
                certificate.write_text("hunter2")
            until(lambda: RELOADED in events(relay), seconds=20, what="the reload is carried out")
            assert relay.ask("/readyz")[1]["config_last_reload_successful"] is True
            emit_types(database, "a.two", "b.late")
            until(lambda: len(received_types(receiver)) == 3, seconds=30, what="both types arrive")
            rewrite(relay, ('"b.*"', '"c.*"'))
            until(lambda: REFUSED in events(relay), seconds=20, what="the bad file is refused")
            assert f"client_certificate {certificate}" in relay.log.read_text()
            assert query(database, "select patterns from outbox.sink") == [(["a.*", "b.*"],)]
            emit_types(database, "b.later")
            until(lambda: "b.later" in received_types(receiver), seconds=30, what="it delivers as before")
            assert relay.stop() == 0
    assert set(received_types(receiver)) == {"a.one", "a.two", "b.late", "b.later"}
    assert {request.header("x-tenant") for request in receiver.requests[1:]} == {"two"}
    assert "config.reload_pending" not in events(relay)


@pytest.mark.fence("the answer to a reload is lost")
def test_a_reload_whose_answer_is_lost_supersedes_nobody_for_good(
    database: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has the new generation and the relay does not know it: a mock of the one call loses the answer."""
    file = tmp_path / "relay.toml"
    file.write_text(webhook_config(database.dsn, receiver, tmp_path))
    register, lost = Store.register_sinks, 0

    def loses(*arguments: Any, **options: Any) -> Any:
        nonlocal lost
        answer = register(*arguments, **options)
        if lost < 2:
            lost += 1
            raise DatabaseUnavailable("the answer was lost")
        return answer

    def script() -> None:
        emit_types(database, "a.one")
        until(lambda: received_types(receiver) == ["a.one"], seconds=30, what="it delivers")
        monkeypatch.setattr(Store, "register_sinks", loses)
        file.write_text(file.read_text().replace(*MORE))
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: lost == 2, seconds=30, what="the answers are lost")
        emit_types(database, "a.two", "b.two")
        until(lambda: len(received_types(receiver)) >= 3, seconds=30, what="both types arrive")

    serve_while(file, script)
    assert sorted(map(str, received_types(receiver))) == ["a.one", "a.two", "b.two"]
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]


SUPERSEDED = "config.superseded"
CRM = """select patterns, generation, (select config from outbox.meta) from outbox.sink"""
OWNERS = "select distinct owner from outbox.owned"
SEEN = "select seen_at from outbox.relay where id = %s"


@pytest.mark.slow
def test_a_process_with_an_older_configuration_that_comes_back_changes_nothing_for_those_that_stayed(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """It was stopped for longer than its leases, while a newer configuration was rolled out."""
    text = webhook_config(database.dsn, receiver, tmp_path)
    with RelayService(tmp_path, text, "older", expects={"incarnation", "lease_lost"}) as older:
        until(lambda: len(query(database, OWNERS)) == 1, seconds=30, what="the older process serves the sink")
        [(relay,)] = query(database, OWNERS)
        older.send(signal.SIGSTOP)
        with RelayService(tmp_path, text.replace(*MORE), "newer") as newer:
            others = f"{OWNERS} and owner <> %s"
            until(lambda: query(database, others, relay), seconds=30, what="the newer process serves the sink")
            in_force = query(database, CRM)
            older.send(signal.SIGCONT)
            until(lambda: SUPERSEDED in events(older), seconds=30, what="the older process notices")
            for _ in range(5):  # renewals, of which four without any relay that serves the sink would give it back
                seen = query(database, SEEN, relay)
                until(lambda s=seen: query(database, SEEN, relay) != s, seconds=30, what="it renews its leases")
            emit_types(database, "a.1", "b.1")
            until(lambda: {*received_types(receiver)} >= {"a.1", "b.1"}, seconds=30, what="events of both types arrive")
            assert query(database, CRM) == in_force
            said = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
            [found] = [each for each in said if each["id"] == "relay-configurations"]
            assert found["evidence"].startswith("settings: routes")
            assert newer.stop() == 0
        assert older.stop() == 0
