"""docs/commands.md: examples whose output depends on relays, people and what happened before."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outbox_relay.domain.outcomes import Attempt, Refused, Unavailable
from outbox_relay.postgres.migrations import migrate
from tests.docs.pages import blocks, commands
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.examples import answer, assert_true, examples, register
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.receiver.answers import in_turn, say
from tests.support.relay_config import webhook_config
from tests.support.relay_harness import running, spec
from tests.support.replays import Clients, ended, start
from tests.support.roles import new_role
from tests.support.schedules import register as register_schedules
from tests.support.schedules import schedule
from tests.support.service import RelayService
from tests.support.wait import until

PAGE = "docs/commands.md"
GROUPS = ("health", "rebase", "config ", "sinks ", "replay ", "schedules ", "audit", "dead ", "why")
"""Groups of commands whose examples are run, those of the last one in `tests/integration/test_dead_commands.py`."""
NOT_RUN = {"erase", "demo", "drill"}
DEAD = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at)
select 'crm', id, shard, 'dead', true, now(), uid, type, key, payload, coalesce(content_type, 'application/json'),
       created_at
  from outbox.event order by id limit 3"""
REFUSED = Refused("answered 400 Bad Request", 400, Attempt("http_400", 0.0126))
SETTLED = "select from outbox_internal.backlog('crm', null, 1000, 5.0) where events = 0"


@pytest.fixture
def shop(database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Return the database that commands without options use, with a few events of the key that the page names."""
    monkeypatch.setenv("OUTBOX_RELAY_DATABASE__DSN", database.dsn)
    for _ in range(4):
        query(database, "select outbox.emit('order.created', '{}', key => 'k7')")
    return database


@pytest.mark.usefixtures("shop")
def test_rebase() -> None:
    [example] = examples("rebase")
    assert_true(example)


def test_config_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = examples("config show")
    with Receiver() as receiver:
        text = webhook_config("postgresql://relay@nowhere.invalid/shop", receiver, tmp_path)
    (tmp_path / "relay.toml").write_text(re.sub('url = ".*"', 'url = "https://crm.example.com/hooks"', text))
    monkeypatch.setenv("OUTBOX_RELAY_CONFIG", str(tmp_path / "relay.toml"))
    shown = answer(example, "").out.replace(f"{tmp_path}/secrets", "/run/secrets/crm")
    digest = re.compile(r"(?<=  # )[0-9a-f]{8}(, since 20\S+T\S+)?$", re.MULTILINE)
    assert set(digest.sub("…", example).splitlines()[1:]) <= set(digest.sub("…", shown).splitlines())


def test_health(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = examples("health")
    with Receiver() as receiver:
        text = webhook_config(database.dsn, receiver, tmp_path)
        with RelayService(tmp_path, text) as relay:
            monkeypatch.setenv("OUTBOX_RELAY_CONFIG", str(relay.config))
            until(lambda: inside("health").json["sinks"]["crm"]["shards"] == 64, seconds=20, what="it owns all shards")
            assert_true(example)


@pytest.mark.slow  # runs what a page shows
@pytest.mark.parametrize("example", examples("sinks "), ids=lambda example: example.partition("\n")[0][14:30])
def test_sinks(shop: Database, example: str) -> None:
    with running(shop.dsn, (spec("crm"), MemorySink())):
        has(shop, SETTLED)
    if " remove " in example:
        query(shop, f"{DEAD} returning 1")
    if " probe " in example:
        query(shop, "update outbox.sink set circuit = 'open' returning 1")
    assert_true(example)


def waits(shop: Database) -> bool:
    """Return True once all events of the replay are counted, and some of them failed."""
    found = inside("replay", "show", "3", "--json", "--dsn", shop.dsn).json
    return bool(found["total_exact"] and found["waiting"])


@pytest.mark.slow  # runs what a page shows
def test_replays(shop: Database, tmp_path: Path) -> None:
    query(shop, "select setval(pg_get_serial_sequence('outbox.replay', 'id'), 2)")
    with Receiver() as receiver:
        config = webhook_config(shop.dsn, receiver, tmp_path).replace('"a.*"', '"*"')
        with RelayService(tmp_path, config):
            until(lambda: query(shop, SETTLED), seconds=20, what="the sink has passed the events")
            receiver.answer = say(500)
            started, *others = examples("replay ")
            assert_true(started)
            until(lambda: waits(shop), seconds=20, what="events of the replay are counted, and wait")
            for example in others:
                assert_true(example)


def test_schedules(shop: Database) -> None:
    wanted = {"cron": "30 3 * * MON-FRI", "timezone": "Europe/Berlin"}
    register_schedules(shop, schedule("nightly_report", **wanted))
    last = datetime(2026, 11, 24, 2, 30, tzinfo=UTC)
    times = "update outbox.schedule set after_at = %s, last_at = %s, next_at = '2100-01-01 02:30:00+00' returning 1"
    query(shop, times, last, last)
    for example in examples("schedules "):
        assert_true(example)
    assert query(shop, "select from outbox.schedule") == []


def test_audit(shop: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = examples("audit")
    register(shop, "crm")
    query(shop, "delete from outbox.event where id > 1 returning 1")
    gone = MemorySink(lambda _event, _attempt: Unavailable("answered 410 Gone", 410, gone=True))
    with new_role(shop, "relay") as relay, new_role(shop, "operators") as operators:
        migrate(shop.dsn, grants={"relay": [relay], "operate": [operators]})
        with running(shop.dsn_as(relay), (spec("crm"), gone)):
            has(shop, "select from outbox.sink where paused")
        query(shop, f"{DEAD} returning 1")
        query(shop, "delete from outbox.event returning 1")
        monkeypatch.setenv("OUTBOX_RELAY_DATABASE__DSN", shop.dsn_as(operators))
        discarded = "outbox-relay dead discard --sink crm --reason 'customer was deleted' --yes"
        answer(discarded, "")
        assert_true(example, instead={relay: "relay", operators: "operators"})


@pytest.mark.slow  # runs what a page shows
def test_why_of_a_discarded_event_and_its_replays(shop: Database) -> None:
    """The numbers of the replays are those of the page."""
    example, _ = examples("why")
    query(shop, "delete from outbox.event where id > 1 returning 1")
    query(shop, "update outbox.event set key = 'order-1' returning 1")
    query(shop, "select setval(pg_get_serial_sequence('outbox.replay', 'id'), 2)")
    refuses = MemorySink(lambda _event, _attempt: REFUSED)
    sinks = (spec("crm"), MemorySink()), (spec("events"), refuses)
    with running(shop.dsn, *sinks, replay_client=Clients()):
        has(shop, "select from outbox.delivery where sink = 'events' and state = 'dead'")
        discarded = "outbox-relay dead discard --sink events --reason 'wrong customer' --yes"
        answer(discarded, "")
        for number, sink in (3, "crm"), (4, "events"):
            assert start(shop, sink, since="PT1H") == number
            ended(shop, number)
    [(uid,)] = query(shop, "select uid::text from outbox.event")
    assert_true(example, uid, instead={"  harness  ": "  relay-1:40213  "})


def test_why_lists_the_recorded_attempts(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, example = examples("why")
    monkeypatch.setenv("OUTBOX_RELAY_DATABASE__DSN", database.dsn)
    with Receiver() as receiver:
        receiver.answer = in_turn(say(500), say(204))
        text = webhook_config(database.dsn, receiver, tmp_path).replace('"a.*"', '"*"')
        text = text.replace("[relay]", '[relay]\nname = "relay-1:40213"')
        text = text.replace("[sinks.crm]", '[sinks.crm]\nrecord_attempts = "all"')
        [(uid,)] = query(database, "select outbox.emit('order.created', '{}', key => 'order-1')::text")
        with RelayService(tmp_path, text):
            recorded = "select from outbox.attempt where outcome = 'delivered'"
            until(lambda: query(database, recorded), seconds=30, what="the second attempt is recorded")
    assert_true(example, uid)


def test_every_example_is_run() -> None:
    here = [example for group in GROUPS for example in examples(group)]
    shown = [line for block in blocks(PAGE) if block.language == "text" for line in commands(block)]
    left = {line for line in shown if line not in {example.partition("\n")[0] for example in here}}
    assert {tuple(line.split()[1:2]) for line in left} == {(command,) for command in NOT_RUN}
