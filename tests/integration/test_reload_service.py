"""SIGHUP of the whole process: while the database is away, when its answer is lost, when it asks for too much."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay import settings
from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.postgres.store import Store
from outbox_relay.service.process import Service
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver
from tests.support.receiver.certificates import Authority
from tests.support.receiver.received import received_types
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.wait import becomes, until

MORE = ('"a.*" =', '"b.*" = ["crm"]\n"a.*" =')
REFUSED = "the configuration was not reloaded; nothing has changed"
RELOADED = "configuration reloaded"


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def events(relay: RelayService) -> list[str]:
    """The events of its log lines."""
    return [line["event"] for line in relay.lines() if "event" in line]


def rewrite(relay: RelayService, *replaced: tuple[str, str]) -> None:
    """Change the relay's file, and send it SIGHUP."""
    text = relay.config.read_text()
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    relay.config.write_text(text)
    relay.send(signal.SIGHUP)


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
            until(lambda: "the configuration is not reloaded yet" in events(relay), seconds=40, what="it waits")
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


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        (("[sinks.crm]", '[sinks.crm]\norder = "none"'), "sinks.crm.order: needs a restart"),
        (("[sinks.crm]", "[sinks.crm]\nmax_in_flight = 3"), "sinks.crm.max_in_flight: needs a restart"),
        (("lease_seconds = 3", "lease_seconds = 4"), "relay.lease_seconds: needs a restart"),
        (("sinks.crm", "sinks.erp"), "sinks.erp: was added: needs a restart"),
        (('type = "webhook"', 'type = "kafka"'), "sinks.crm.type: needs a restart"),
    ],
    ids=["order", "limit", "lease", "name", "type"],
)
def test_what_needs_a_restart_is_refused_by_name_and_nothing_is_half_applied(
    database: Database, receiver: Receiver, tmp_path: Path, replaced: tuple[str, str], named: str
) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path), expects={"reload"}) as relay:
        emit_types(database, "a.one")
        until(lambda: len(receiver.requests) == 1, seconds=30, what="it delivers")
        before = relay.config.read_text()
        changes = [replaced, MORE, ('"one"', '"two"')]
        if replaced[0] == "sinks.crm":
            changes = [replaced, ('["crm"]', '["erp"]')]
        if "kafka" in replaced[1]:
            section = before[before.index("[sinks.crm]") : before.index("[routes]")]
            kafka = '[sinks.crm]\ntype = "kafka"\ntopic = "t"\nproducer = { "bootstrap.servers" = "127.0.0.1:1" }\n'
            changes = [(section, kafka), MORE]
        rewrite(relay, *changes)
        until(lambda: REFUSED in events(relay), seconds=20, what="it is refused")
        [said] = [line["reason"] for line in relay.lines() if line.get("event") == REFUSED]
        assert named in said
        assert SECRET not in relay.log.read_text()
        assert relay.ask("/readyz")[1]["config_last_reload_successful"] is False
        assert query(database, "select name, patterns from outbox.sink") == [("crm", ["a.*"])]
        emit_types(database, "b.one", "a.two")
        until(lambda: len(receiver.requests) == 2, seconds=30, what="it delivers as before")
        assert [request.header("x-tenant") for request in receiver.requests] == ["one", "one"]
        relay.config.write_text(before)
        rewrite(relay, MORE, ('"one"', '"two"'))
        until(lambda: RELOADED in events(relay), seconds=20, what="the good file is taken")
        emit_types(database, "b.two")
        until(lambda: "b.two" in received_types(receiver), seconds=30, what="the new type arrives")
        assert relay.stop() == 0
    assert received_types(receiver) == ["a.one", "a.two", "b.two"]
    assert receiver.requests[-1].header("x-tenant") == "two"


def test_a_sink_that_was_removed_is_not_registered_again_by_a_reload(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path)) as relay:
        with database.connect() as connection:
            for table in ("delivery", "progress", "shard"):
                connection.execute(f"delete from outbox.{table} where sink = 'crm'".encode())
            connection.execute("delete from outbox.sink where name = 'crm'")
        rewrite(relay, MORE)
        until(lambda: REFUSED in events(relay), seconds=20, what="it is refused")
        [said] = [line["reason"] for line in relay.lines() if line.get("event") == REFUSED]
        assert said.startswith("sinks.crm: was removed from the database")
        assert query(database, "select count(*) from outbox.sink") == [(0,)]
        assert relay.stop() == 0


WAITING = """select 1 from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and query like '%%register_sinks%%'"""


def test_a_file_that_goes_bad_while_the_database_takes_a_reload_leaves_it_whole(
    database: Database, tmp_path: Path
) -> None:
    """What was read applies: else the database would have a generation that this relay gives its sinks up to."""
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
    assert "the configuration is not reloaded yet" not in events(relay)


async def test_a_reload_whose_answer_is_lost_supersedes_nobody_for_good(
    database: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has the new generation and the relay does not know it: a mock of the one call loses the answer."""
    file = tmp_path / "relay.toml"
    file.write_text(webhook_config(database.dsn, receiver, tmp_path) + f'[http]\nlisten = "127.0.0.1:{free_port()}"\n')
    register, lost = Store.register_sinks, 0

    async def loses(*arguments: Any, **options: Any) -> Any:
        nonlocal lost
        answer = await register(*arguments, **options)
        if lost < 2:
            lost += 1
            raise DatabaseUnavailable("the answer was lost")
        return answer

    service = Service(settings.load(file, {}), lambda: settings.load(file, {}))
    serving = asyncio.create_task(service.serve())
    try:
        emit_types(database, "a.one")
        await becomes(lambda: received_types(receiver) == ["a.one"], "it delivers")
        monkeypatch.setattr(Store, "register_sinks", loses)
        file.write_text(file.read_text().replace(*MORE))
        os.kill(os.getpid(), signal.SIGHUP)
        await becomes(lambda: lost == 2, "the answers are lost")
        emit_types(database, "a.two", "b.two")
        await becomes(lambda: len(received_types(receiver)) >= 3, "both types arrive")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 40) == 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert sorted(map(str, received_types(receiver))) == ["a.one", "a.two", "b.two"]
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]


SUPERSEDED = "another configuration of this sink is in force; draining"
CRM = """select patterns, generation, (select config from outbox.meta) from outbox.sink"""
OWNERS = "select distinct owner from outbox.shard where lease_until > now()"
SEEN = "select seen_at from outbox.relay where id = %s"


def test_a_process_with_an_older_configuration_that_comes_back_changes_nothing_for_those_that_stayed(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """It was stopped for longer than its leases, while a newer configuration was rolled out."""
    text = webhook_config(database.dsn, receiver, tmp_path)
    with RelayService(tmp_path, text, "older") as older:
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
            assert newer.stop() == 0
        assert older.stop() == 0
