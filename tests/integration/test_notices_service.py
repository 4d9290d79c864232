"""Notices of relay processes: who receives them, how many there are, and what becomes of them when they fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.notices import notice_types
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.received import received_types
from tests.support.receiver.signatures import SECRET
from tests.support.roles import new_role
from tests.support.service import RelayService
from tests.support.sink_actions import call
from tests.support.wait import until

SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
permanent_statuses = [400]
allow_http = true
allow_networks = ["127.0.0.0/8"]
"""
NOTIFY = '[notify]\nsink = "ops"\n'
DEAD, PAUSED, RECOVERED, LAGGING = "outbox.dead", "outbox.sink.paused", "outbox.sink.recovered", "outbox.sink.lagging"


@pytest.fixture
def crm() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def ops() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def config(dsn: str, crm: Receiver, ops: Receiver | None, routes: str = '"*" = ["crm"]') -> str:
    """Return a file with a webhook for every type, and one that receives notices."""
    sinks = {"crm": crm, **({} if ops is None else {"ops": ops})}
    tables = "".join(SINK.format(name=name, url=receiver.url, secret=SECRET) for name, receiver in sinks.items())
    return f'[database]\ndsn = "{dsn}"\n[relay]\nlease_seconds = 3\n{tables}{NOTIFY if ops else ""}[routes]\n{routes}\n'


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    """Return the payloads that a receiver got, as JSON."""
    return [json.loads(request.body) for request in receiver.requests]


def events_of_sinks(relay: RelayService) -> set[tuple[str, str | None]]:
    """Return the events that a relay logged, with their sinks."""
    return {(line["event"], line.get("sink")) for line in relay.lines()}


def refuse_bad(request: Request) -> Behaviour:
    """Refuse events of one type."""
    return say(400, body=b"CANARY-ANSWER") if request.header("outbox-type") == "a.bad" else say(204)


def test_dead_letters_and_pauses_reach_the_receiver_alone_once_for_two_relays(
    database: Database, crm: Receiver, ops: Receiver, tmp_path: Path
) -> None:
    """Relays have the grants of their role alone."""
    crm.answer = chosen(refuse_bad)
    with new_role(database, "relay") as role:
        migrate(database.dsn, grant_relay=[role])
        text = config(database.dsn_as(role), crm, ops)
        with RelayService(tmp_path, text, "one") as one, RelayService(tmp_path, text, "two") as two:
            owners = "select 1 from outbox.shard where sink = 'crm' having count(distinct owner) = 2"
            until(lambda: query(database, owners), seconds=30, what="both relays own shards")
            emit_types(database, *["a.bad", "a.good"] * 15)  # fewer than open the circuit
            dead = "select 1 from outbox.delivery where state = 'dead' having count(*) = 15"
            until(lambda: query(database, dead), seconds=30, what="all refused events are dead")
            until(lambda: received_types(ops), seconds=30, what="the notice arrives")
            assert inside("pause", "crm", "--dsn", database.dsn_as(role), "--reason", "new version").code == 0
            until(lambda: PAUSED in received_types(ops), seconds=30, what="the pause is told")
            assert inside("resume", "crm", "--dsn", database.dsn_as(role)).code == 0
            until(lambda: RECOVERED in received_types(ops), seconds=30, what="the resumption is told")
            emit_types(database, "a.last")
            until(lambda: "a.last" in received_types(crm), seconds=30, what="the other sink goes on")
            assert (one.stop(), two.stop()) == (0, 0)
    assert received_types(ops) == [DEAD, PAUSED, RECOVERED]
    assert set(received_types(crm)) == {"a.bad", "a.good", "a.last"}
    first, paused, _ = bodies(ops)
    assert (first["sink"], first["reason"], first["status"], first["type"]) == ("crm", "http_400", 400, "a.bad")
    assert (paused["sink"], paused["reason"]) == ("crm", "new version")
    assert "CANARY" not in json.dumps(bodies(ops))


@pytest.mark.fence("a notice about the receiver of notices causes another")
@pytest.mark.slow
def test_a_notice_that_dies_and_a_receiver_that_is_down_make_no_notices(
    database: Database, crm: Receiver, ops: Receiver, tmp_path: Path
) -> None:
    crm.answer = chosen(refuse_bad)
    ops.answer = say(400)
    with RelayService(tmp_path, config(database.dsn, crm, ops), expects={"handed_over"}) as relay:
        emit_types(database, "a.bad")
        dead = "select sink from outbox.delivery where state = 'dead' order by sink"
        until(lambda: query(database, dead) == [("crm",), ("ops",)], seconds=30, what="the notice is dead")
        ops.answer = say(410)
        call(database, "select outbox.set_paused('crm', true, null, null)")
        paused = "select name from outbox.sink where paused order by name"
        until(lambda: query(database, paused) == [("crm",), ("ops",)], seconds=30, what="the receiver is gone")
        logged = {("event.dead", "crm"), ("event.dead", "ops"), ("sink.paused", "ops")}
        until(lambda: logged <= events_of_sinks(relay), seconds=30, what="all of it is logged")
        assert notice_types(database) == [DEAD, PAUSED]
        refused = Counter(received_types(ops))
        ops.answer = say(204)
        call(database, "select outbox.set_paused('ops', false, null, null)")
        until(lambda: received_types(ops).count(PAUSED) > refused[PAUSED], seconds=30, what="what waited arrives")
        assert inside("dead", "retry", "--sink", "ops", "--yes", "--dsn", database.dsn).code == 0
        until(lambda: received_types(ops).count(DEAD) > refused[DEAD], seconds=30, what="the dead notice is delivered")
        [(uid,)] = query(database, "select uid::text from outbox.event where type = %s", DEAD)
        states = inside("why", uid, "--json", "--dsn", database.dsn).json["sinks"]
        assert (states["crm"]["state"], states["ops"]["state"]) == ("not routed", "delivered")
        assert relay.stop() == 0
    assert notice_types(database) == [DEAD, PAUSED]


@pytest.mark.slow
def test_a_sink_that_lags_is_told_and_logged_and_so_is_its_recovery(
    database: Database, crm: Receiver, ops: Receiver, tmp_path: Path
) -> None:
    crm.answer = say(503)
    with RelayService(tmp_path, config(database.dsn, crm, ops)) as relay:
        emit_types(database, "a.one")
        until(lambda: crm.requests, seconds=30, what="the destination is down")
        for table in ("event", "delivery"):
            call(database, f"update outbox.{table} set created_at = created_at - interval '10 minutes'")
        until(lambda: LAGGING in received_types(ops), seconds=60, what="the lag is told")
        [lagging] = bodies(ops)
        assert (lagging["sink"], lagging["lagging_seconds"]) == ("crm", 300)
        assert lagging["lag_seconds"] >= 600  # a tenth of a second is the least
        crm.answer = say(204)
        until(lambda: RECOVERED in received_types(ops), seconds=90, what="the recovery is told")
        logged = {("sink.lagging", "crm"), ("sink.recovered", "crm")}
        until(lambda: logged <= events_of_sinks(relay), seconds=30, what="both are logged")
        assert relay.stop() == 0
    assert received_types(ops) == [LAGGING, RECOVERED]


def set_paused(database: Database, paused: bool) -> None:
    """Pause or resume the other sink."""
    call(database, "select outbox.set_paused('crm', %s, null, null)", paused)
