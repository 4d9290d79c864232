"""The commands on schedules, the rights that they need, and a relay process that fires what its file says."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_config
from tests.support.roles import callable_by, denied, new_role
from tests.support.schedules import SCHEDULED_FOR, emitted, minute_of, put, register, row, schedule
from tests.support.service import RelayService
from tests.support.wait import until

SECONDS = 30
EVERY_MINUTE = """
[schedules.minutely]
cron = "* * * * *"
type = "a.due"
payload = {n = 1}
headers = {source = "file"}
key = "k"
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def run(database: Database, *arguments: str) -> Ended:
    """Run a command on schedules."""
    return inside("schedules", *arguments, "--dsn", database.dsn)


def test_a_list_without_a_schedule(database: Database) -> None:
    assert run(database, "list").out == "there is no schedule: a relay registers those of its file when it starts\n"
    assert run(database, "list", "--json").json == {"schedules": []}


def test_a_list_of_schedules(database: Database) -> None:
    register(
        database, schedule("b", missed="skip"), schedule("a", cron="30 3 * * *", timezone="Europe/Berlin", key="k")
    )
    due = minute_of(database) - timedelta(minutes=10)
    put(database, "b", due)
    shown = run(database, "list").out.splitlines()
    assert shown[0].split() == ["SCHEDULE", "STATE", "CRON", "TIMEZONE", "TYPE", "MISSED", "LAST", "NEXT"]
    assert shown[1].split() == ["a", "active", "30", "3", "*", "*", "*", "Europe/Berlin", "report.due", "one", "-", "-"]
    assert shown[2].split()[-3:] == ["skip", "-", due.isoformat()[:19]]
    assert shown[3].startswith("schedule b: late by 1")
    [a, b] = run(database, "list", "--json").json["schedules"]
    assert (a["name"], a["key"], a["next_at"], a["late_seconds"], a["state"]) == ("a", "k", None, None, "active")
    assert b["late_seconds"] >= 600
    assert "payload" not in a


def test_the_reason_of_a_refusal_is_listed(database: Database) -> None:
    register(database, schedule())
    query(database, "update outbox.schedule set error = 'because', error_at = '2026-01-01 00:00:00+00' returning 1")
    assert run(database, "list").out.splitlines()[-1] == "schedule nightly: failed at 2026-01-01T00:00:00: because"
    query(database, "update outbox.schedule set retry_at = '2026-01-01 00:01:00+00' returning 1")
    assert run(database, "list").out.splitlines()[-1] == "schedule nightly: refused at 2026-01-01T00:00:00: because"
    [found] = run(database, "list", "--json").json["schedules"]
    assert (found["error"], found["retry_at"]) == ("because", "2026-01-01T00:01:00+00:00")


def test_run_emits_now_and_leaves_the_times(database: Database) -> None:
    register(database, schedule(headers={"source": "x"}))
    put(database, "nightly", minute_of(database) + timedelta(hours=1))
    before = row(database)
    ended = run(database, "run", "nightly", "--reason", "again")
    found = query(database, "select uid::text, type, headers ->> 'source' from outbox.event")
    assert found == [(ended.out.strip(), "report.due", "x")]
    assert len(emitted(database)[0]) == len("2026-01-01T00:00:00Z")
    assert row(database) == before
    assert query(database, "select action, filter ->> 'schedule', count, reason from outbox.audit") == [
        ("schedule run", "nightly", 1, "again")
    ]
    assert run(database, "run", "nightly", "--json").json.keys() == {"uid"}


def test_run_of_an_event_that_the_schema_refuses(database: Database) -> None:
    migrate(database.dsn, max_payload_bytes=1024)
    register(database, schedule(payload={"a": "x" * 2000}))
    ended = run(database, "run", "nightly")
    assert (ended.code, ended.out) == (2, "")
    assert "payload must have at most 1024 bytes" in ended.err
    assert query(database, "select from outbox.audit") == []


def test_pause_and_resume(database: Database) -> None:
    register(database, schedule())
    assert run(database, "pause", "nightly").out == "schedule nightly is paused\n"
    assert run(database, "pause", "nightly").out == "schedule nightly was paused already: nothing to do\n"
    assert run(database, "list", "--json").json["schedules"][0]["state"] == "paused"
    assert run(database, "resume", "nightly", "--json").json == {"done": 1, "left": 0}
    assert run(database, "resume", "nightly", "--json").json == {"done": 0, "left": 0}


def test_remove(database: Database) -> None:
    register(database, schedule())
    query(
        database,
        "insert into outbox.relay (id, name, version, sinks, config) values "
        "(gen_random_uuid(), 'web-1', '1', '{}', %s) returning 1",
        json.dumps({"schedules.nightly.cron": "* * * * *"}),
    )
    ended = run(database, "remove", "nightly", "--reason", "gone")
    assert (ended.code, ended.out) == (0, "schedule nightly is removed\n")
    assert ended.err == "relays that have nightly in their files register it again when they start or reload: web-1\n"
    assert query(database, "select from outbox.schedule") == []
    assert query(database, "select action, reason from outbox.audit") == [("schedule remove", "gone")]


@pytest.mark.parametrize("action", ["run", "pause", "resume", "remove"])
def test_an_unknown_schedule_is_not_found_and_the_nearest_is_named(database: Database, action: str) -> None:
    register(database, schedule())
    ended = run(database, action, "nightyl")
    assert ended.code == 3
    assert "there is no schedule 'nightyl' in this database; did you mean nightly?" in ended.err
    assert "there are: nightly" in run(database, action, "x").err


def test_each_role_does_what_it_is_granted_and_no_more(database: Database) -> None:
    actions = {"run_schedule", "set_schedule"}
    firing = {"fire_schedule_times"}
    register(database, schedule())
    nothing: set[str] = set()
    allowed = {**dict.fromkeys(("emit", "consume", "read", "payloads"), nothing), "operate": actions, "relay": firing}
    for kind, functions in allowed.items():
        with new_role(database, kind) as name:
            migrate(database.dsn, grants={kind: [name]})
            assert callable_by(database, name) & (actions | firing) == functions, kind
            if kind != "relay":
                denied(database, name, "update outbox.schedule set paused = true")
                denied(database, name, "insert into outbox.schedule (name) values ('x')")
                denied(database, name, "select nextval('outbox.schedule_generation')")
            if kind not in ("payloads", "relay"):
                denied(database, name, "select payload from outbox.schedule")
            listed = inside("schedules", "list", "--json", "--dsn", database.dsn_as(name))
            assert listed.code == (0 if kind in ("read", "operate", "payloads", "relay") else 2), (kind, listed.err)
            ended = inside("schedules", "run", "nightly", "--dsn", database.dsn_as(name))
            assert ended.code == (0 if kind == "operate" else 2)
            if kind == "read":
                assert "--grant-operate" in ended.err


def test_a_relay_fires_a_schedule_of_its_file_and_delivers_it(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    config = webhook_config(database.dsn, receiver, tmp_path).replace(
        "[routes]", f'forward_headers = ["{SCHEDULED_FOR}"]\n[routes]'
    )
    with RelayService(tmp_path, config + EVERY_MINUTE) as relay:
        until(lambda: query(database, "select from outbox.schedule where next_at is not null"),
              seconds=SECONDS, what="the schedule has a next time")  # fmt: skip
        put(database, "minutely", minute_of(database))
        [request] = until(lambda: receiver.requests, seconds=SECONDS, what="an event is delivered")
        assert request.body == b'{"n": 1}'
        assert dict(request.headers)[SCHEDULED_FOR] == emitted(database)[0]
        assert relay.stop() == 0


def test_a_reload_registers_schedules(database: Database, receiver: Receiver, tmp_path: Path) -> None:
    with RelayService(tmp_path, webhook_config(database.dsn, receiver, tmp_path)) as relay:
        assert query(database, "select from outbox.schedule") == []
        relay.config.write_text(relay.config.read_text() + EVERY_MINUTE)
        relay.send(signal.SIGHUP)
        until(lambda: query(database, "select from outbox.schedule where name = 'minutely' and next_at is not null"),
              seconds=SECONDS, what="the schedule is registered")  # fmt: skip
        before = row(database, "minutely")
        relay.config.write_text(relay.config.read_text().replace('"* * * * *"', '"*/5 * * * *"'))
        relay.send(signal.SIGHUP)
        until(lambda: row(database, "minutely")["cron"] == "*/5 * * * *", seconds=SECONDS, what="it is changed")
        assert row(database, "minutely")["generation"] > before["generation"]
        relay.config.write_text(relay.config.read_text().replace('"*/5 * * * *"', '"0 0 30 2 *"'))
        relay.send(signal.SIGHUP)
        until(lambda: "config.reload_refused" in relay.log.read_text(), seconds=SECONDS, what="it is refused")
        assert "schedules.minutely.cron: the day-of-month is not valid, or never comes" in relay.log.read_text()
        assert row(database, "minutely")["cron"] == "*/5 * * * *"
        assert relay.stop() == 0


@pytest.mark.slow
def test_an_old_relay_that_restarts_during_a_deployment_does_not_leave_its_schedules(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    config = webhook_config(database.dsn, receiver, tmp_path)
    with RelayService(tmp_path, config + EVERY_MINUTE.replace("n = 1", "n = 2"), "new") as staying:
        until(lambda: query(database, "select from outbox.schedule"), seconds=SECONDS, what="the new one is registered")
        with RelayService(tmp_path, config + EVERY_MINUTE, "old") as leaving:
            until(
                lambda: row(database, "minutely")["payload"] == {"n": 1},
                seconds=SECONDS,
                what="the old one is in force",
            )
            until(
                lambda: "schedules.superseded" in staying.log.read_text(), seconds=SECONDS, what="the new one notices"
            )
            assert row(database, "minutely")["payload"] == {"n": 1}
            assert leaving.stop() == 0
        until(lambda: row(database, "minutely")["payload"] == {"n": 2}, seconds=SECONDS, what="the new one is back")
        until(lambda: "schedules.taken_back" in staying.log.read_text(), seconds=SECONDS, what="it says so")
        assert staying.stop() == 0


def test_check_warns_of_a_schedule_without_a_route(database: Database, receiver: Receiver, tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(webhook_config(database.dsn, receiver, tmp_path) + EVERY_MINUTE.replace("a.due", "b.due"))
    ended = inside("check", "-c", path)
    assert ended.code == 0
    assert "schedules.minutely.type: no route takes the type b.due" in ended.err
    path.write_text(path.read_text().replace('"* * * * *"', '"* * *"'))
    ended = inside("check", "-c", path)
    assert ended.code == 2
    assert 'schedules.minutely.cron: should have five fields, "MINUTE HOUR DAY MONTH WEEKDAY"' in ended.err
