"""SIGHUP of the whole process: what is applied, while the database is away, and when its answer is lost."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.postgres.store import Store
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.metrics import scrape, value_of
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority
from tests.support.receiver.received import received_types
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_config
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


def last(relay: RelayService, event: str) -> dict[str, Any]:
    """Return the last line with an event."""
    return [line for line in relay.lines() if line.get("event") == event][-1]


def reloaded(relay: RelayService, *replaced: tuple[str, str], event: str = RELOADED) -> dict[str, Any]:
    """Change the relay's file, send it SIGHUP, and wait for the line that answers it."""
    before = events(relay).count(event)
    rewrite(relay, *replaced)
    until(lambda: events(relay).count(event) > before, seconds=20, what=f"the log has {event}")
    return last(relay, event)


def rerouted(relay: RelayService, *replaced: tuple[str, str]) -> dict[str, Any]:
    """Reload with other routes of the sink crm, and wait until it is served with them."""

    def served() -> int:
        return sum((line.get("event"), line.get("sink")) == ("sink.reloaded", "crm") for line in relay.lines())

    before = served()
    line = reloaded(relay, *replaced)
    until(lambda: served() > before, seconds=20, what="crm has its new routes")
    return line


def arrives(receiver: Receiver, kind: str) -> Any:
    """Wait until an event of a type arrives, and return its request."""
    until(lambda: kind in received_types(receiver), seconds=30, what=f"{kind} arrives")
    return next(each for each in receiver.requests if each.header("outbox-type") == kind)


def test_everything_but_the_process_is_applied_and_a_wrong_file_changes_nothing(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    tenant = tmp_path / "tenant"
    tenant.write_text("one")
    text = webhook_config(database.dsn, receiver, tmp_path).replace('"one"', f'{{ file = "{tenant}" }}')
    new = "whsec_" + base64.b64encode(b"x" * 32).decode()
    with Receiver() as other, RelayService(tmp_path, text, expects={"reload"}) as relay:
        for n in range(20):
            emit_types(database, f"a.{n}")
        arrives(receiver, "a.0")

        line = reloaded(relay, ("lease_seconds = 3", "lease_seconds = 4"), MORE)
        assert (line["applied"], line["needs_restart"]) == (["routes"], ["relay.lease_seconds"])
        assert last(relay, RESTART)["reason"] == "relay.lease_seconds"
        emit_types(database, "b.one")
        assert arrives(receiver, "b.one").header("x-tenant") == "one"

        for file, content, named in (
            (tmp_path / "secrets", new, ["sinks.crm.secrets[0].secret"]),
            (tenant, "two", ["sinks.crm.headers.x-tenant"]),
            (tenant, "two", []),
        ):
            file.write_text(content)
            assert reloaded(relay)["applied"] == named
        (tmp_path / "secrets").write_text("nonsense")
        assert "secrets[0]: " in reloaded(relay, event=REFUSED)["reason"]
        assert relay.ask("/readyz")[1]["config_last_reload_successful"] is False
        until(lambda: _refusals(database) == 1, seconds=20, what="doctor names it")
        (tmp_path / "secrets").write_text(SECRET)
        assert reloaded(relay)["applied"] == ["sinks.crm.secrets[0].secret"]
        until(lambda: _refusals(database) == 0, seconds=20, what="doctor names it no more")

        limits = ("[sinks.crm]", '[sinks.crm]\norder = "none"\nmax_in_flight = 3\ntimeout_seconds = 7')
        reloaded(relay, limits, (receiver.url, other.url))
        until(lambda: relay.ask("/readyz")[1]["sinks"]["crm"]["in_flight_limit"] == 3, seconds=20, what="in force")
        emit_types(database, "a.late")
        assert arrives(other, "a.late").header("x-tenant") == "two"
        assert relay.stop() == 0
    assert new not in relay.log.read_text()
    sent = [*map(str, received_types(receiver)), *map(str, received_types(other))]
    assert sorted(sent) == sorted([*(f"a.{n}" for n in range(20)), "b.one", "a.late"]), "no request is repeated"


def _refusals(database: Database) -> int:
    """Return the number of relays whose newest reload was refused, as doctor says."""
    findings = inside("doctor", "--json", "--dsn", database.dsn).json["findings"]
    return sum(each["id"] == "config-reload-failed" for each in findings)


SHARDS = "select count(*) from outbox.shard where sink = 'erp' and owner is not null"


def test_sinks_are_added_and_removed(database: Database, receiver: Receiver, tmp_path: Path) -> None:
    """A pattern goes to the new sink in the same reload: no event between the two may be passed by."""
    text = webhook_config(database.dsn, receiver, tmp_path)
    crm = text[text.index("[sinks.crm]") : text.index("[routes]")]
    with Receiver() as other, RelayService(tmp_path, text.replace(*MORE), expects={"reload", "lease_lost"}) as relay:
        erp = crm.replace("crm]", "erp]").replace(receiver.url, other.url)
        with_erp = ("[routes]", f"{erp}[routes]"), ('"b.*" = ["crm"]', '"b.*" = ["erp"]')
        emit_types(database, "a.one", "b.one")
        arrives(receiver, "b.one")
        line = rerouted(relay, *with_erp)
        assert (line["applied"], line["needs_restart"]) == (["sinks.erp", "routes"], [])
        emit_types(database, "a.two", "b.two")
        arrives(receiver, "a.two")
        arrives(other, "b.two")
        assert relay.ask("/readyz")[1]["sinks"].keys() == {"crm", "erp"}
        until(lambda: value_of(scrape(relay.port)[1], "outbox_delivered_total", sink="erp") == 1.0,
              seconds=20, what="the delivery is counted")  # fmt: skip

        for n in range(2):  # its name can come back
            rerouted(relay, *((new, old) for old, new in with_erp))
            until(lambda: query(database, SHARDS) == [(0,)], seconds=20, what="its shards are released")
            assert relay.ask("/readyz")[1]["sinks"].keys() == {"crm"}
            assert value_of(scrape(relay.port)[1], "outbox_shards_owned", sink="erp") is None
            rerouted(relay, *with_erp)
            emit_types(database, f"a.back.{n}", f"b.back.{n}")
            arrives(receiver, f"a.back.{n}")  # so that crm is past both before it has b.* again
            arrives(other, f"b.back.{n}")

        query(database, "select outbox.drop_sink('erp', true, 1000, null, null)")
        line = reloaded(relay, ('"a.*"', '"c.*"'))
        assert line["applied"] == ["routes"]
        assert line["not_applied"][0].startswith("sinks.erp: was removed from the database")
        emit_types(database, "c.one")
        arrives(receiver, "c.one")
        until(lambda: relay.ask("/readyz")[1]["sinks"]["erp"]["fault"], seconds=20, what="it is found removed")

        query(database, "select outbox.drop_sink('crm', true, 1000, null, null)")
        reason = reloaded(relay, ('"c.*"', '"d.*"'), event=REFUSED)["reason"]
        assert reason.startswith("sinks.crm: was removed from the database")
        assert query(database, "select count(*) from outbox.sink") == [(0,)]
        assert relay.stop() == 0
    assert Counter(received_types(receiver)) == Counter(
        ["a.one", "b.one", "a.two", "a.back.0", "a.back.1", "c.one"]
    )  # without keys: in any order
    assert received_types(other) == ["b.two", "b.back.0", "b.back.1"]


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
