"""The commands on schedules, the rights that they need, and a relay process that fires what its file says."""

from __future__ import annotations

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
from tests.support.schedules import SCHEDULED_FOR, emitted, minute_of, put, register, schedule
from tests.support.service import RelayService
from tests.support.wait import until

SECONDS = 30
EVERY_MINUTE = """
[schedules.minutely]
cron = "* * * * *"
type = "a.due"
payload = {n = 1}
key = "k"
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def run(database: Database, *arguments: str) -> Ended:
    """Run a command on schedules."""
    return inside("schedules", *arguments, "--dsn", database.dsn)


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
