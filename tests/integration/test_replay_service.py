"""Replays on real parts: both kinds of sinks, relay processes, and the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.receiver import Receiver
from tests.support.relay_config import kafka_and_webhook_config
from tests.support.service import RelayService
from tests.support.sink_actions import register
from tests.support.wait import until

EVENTS = 3000
UNKNOWN = "00000000-0000-0000-0000-000000000001"


def emit(database: Database, count: int) -> list[str]:
    """Emit events of 50 keys in turn; return their uids."""
    [(uids,)] = query(
        database,
        "select array_agg(outbox.emit('order.created', to_jsonb(n), key => 'k' || mod(n, 50), "
        "headers => jsonb_build_object('outbox-replay', 'forged', 'a', 'b'))::text) from generate_series(1, %s) n",
        count,
    )
    return uids


def command(database: Database, *arguments: str) -> Ended:
    """Run `outbox-relay replay`."""
    return inside("replay", *arguments, "--dsn", database.dsn)


def show(database: Database, number: str) -> dict[str, Any]:
    """Return the result of `replay show`."""
    return command(database, "show", number, "--json").json


def done(database: Database, number: str) -> bool:
    """Return True once a replay is done."""
    return show(database, number)["state"] == "done"


def settled(database: Database) -> bool:
    """Return True once no sink has a backlog."""
    found = inside("status", "--json", "--dsn", database.dsn).json["sinks"]
    return bool(found) and all(sink["backlog"] == 0 for sink in found.values())


def share(relays: list[RelayService]) -> bool:
    """Return True once every relay owns as many shards of each sink as the others."""
    found = [relay.ask("/readyz")[1] for relay in relays]
    return all(body and {sink["shards"] for sink in body["sinks"].values()} == {64 // len(relays)} for body in found)


def in_order(uids: list[str], arrived: list[str]) -> bool:
    """Return True if all arrived, nothing else did, and those of each key first in their order."""
    first = list(dict.fromkeys(arrived))
    keys = {uid: n % 50 for n, uid in enumerate(uids)}
    return set(first) == set(uids) and all(
        [uid for uid in first if keys[uid] == key] == uids[key::50] for key in range(50)
    )


@pytest.mark.slow
def test_both_kinds_of_sinks_get_the_header_while_relays_are_killed(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Goes red when an event's own header of that name is passed on, or the replay's is missing."""

    def records() -> list[tuple[str, bytes | None]]:
        found = kafka.read_all(topic)
        return [(str(r.headers["id"] or b"", "ascii"), r.headers.get("outbox-replay")) for r in found]

    with Receiver() as receiver:
        config = kafka_and_webhook_config(database.dsn, kafka.bootstrap, topic, receiver.url)
        first = RelayService(tmp_path, config, "first", expects={"lease_lost"})
        second = RelayService(tmp_path, config, "second", expects={"lease_lost"})
        with first, second:
            # A broker that answers late while shards move would make one of them give up its shards.
            until(lambda: share([first, second]), seconds=60, what="both relays own their share")
            uids = emit(database, EVENTS)
            until(lambda: settled(database), seconds=60, what="everything is delivered")
            assert {header for _, header in records()} == {None}
            assert {request.header("outbox-replay") for request in receiver.requests} == {None}
            started = command(database, "start", "--sink", "crm", "--since", "1h", "--yes", "--rate", "600")
            assert (started.code, started.out, started.err) == (0, "1\n", "")
            assert command(database, "start", "--sink", "events", "--since", "1h", "--yes").out == "2\n"
            until(lambda: show(database, "1")["delivered"] > 300, seconds=60, what="the replay is under way")
            [running] = inside("status", "--json", "--dsn", database.dsn).json["replays"][-1:]
            assert (running["id"], running["sink"], running["state"]) == (1, "crm", "running")
            first.kill()
            until(lambda: done(database, "1") and done(database, "2"), seconds=90, what="both replays are done")
            found = show(database, "1")
            assert second.stop() == 0
        again = [request for request in receiver.requests if request.header("outbox-replay")]
        assert {request.header("outbox-replay") for request in again} == {"1"}
        assert in_order(uids, [request.uid for request in again])
        assert receiver.unverified == []
    assert (found["total"], found["delivered"], found["failed"], found["passed_by"]) == (EVENTS, EVENTS, 0, 0)
    assert in_order(uids, [uid for uid, header in records() if header == b"2"])
    assert {header for _, header in records()} == {None, b"2"}


@pytest.mark.slow  # as those of test_replay
def test_the_commands_say_what_they_did(database: Database) -> None:
    register(database, "crm")
    register(database, "idle", start="now")
    emit(database, 3)
    there = ("--since", "1h", "--to", "idle")
    asked = command(database, "start", "--sink", "crm", *there)
    assert (asked.code, asked.out) == (2, "")
    assert "deliver 3 events to sink idle?" in asked.err
    counted = command(database, "start", "--sink", "crm", *there, "--dry-run", "--json")
    assert (counted.code, counted.json) == (0, {"matched": 3, "exact": True})
    nothing = command(database, "start", "--sink", "crm", "--key", "k1", "--yes")
    assert (nothing.code, nothing.out) == (0, "")
    assert "no event that the sink has passed matches" in nothing.err
    started = command(database, "start", "--sink", "crm", *there, "--yes")
    assert (started.code, started.out) == (0, "1\n")
    assert "no relay serves sink idle" in started.err
    assert command(database, "list", "--json").json["replays"][0]["to"] == "idle"
    assert "crm to idle" in command(database, "list").out
    assert "replay 1 of sink crm, to sink idle: running" in command(database, "show", "1").out
    assert command(database, "pause", "1").out == "replay 1 is paused\n"
    assert command(database, "pause", "1").out == "replay 1 was paused already: nothing to do\n"
    assert command(database, "resume", "1", "--json").json == {"done": 1, "left": 0}
    assert command(database, "cancel", "1").out == "replay 1 is cancelled\n"
    refused = command(database, "resume", "1")
    assert (refused.code, refused.out) == (2, "")
    assert "replay 1 is cancelled already" in refused.err
    for words in (("pause",), ("cancel",)):
        again = command(database, *words, "1")
        assert (again.code, again.out, again.err) == (0, "replay 1 was cancelled already: nothing to do\n", "")
        assert command(database, *words, "1", "--json").json == {"done": 0, "left": 0}
    query(database, "update outbox.sink set paused = true returning 1")
    paused = command(database, "start", "--sink", "crm", *there, "--yes")
    assert (paused.code, paused.err) == (0, "sink idle is paused: the replay waits until it is resumed\n")
    assert show(database, "2")["waits_for"] == "sink idle is paused"


def test_wrong_input_is_refused_with_the_fix(database: Database) -> None:
    register(database, "crm")
    [uid] = emit(database, 1)
    cases: list[tuple[int, str, tuple[str, ...]]] = [
        (3, "did you mean crm?", ("start", "--sink", "crn", "--since", "1h", "--yes")),
        (3, "did you mean crm?", ("start", "--sink", "crm", "--to", "crn", "--since", "1h", "--yes")),
        (2, "a replay needs since, key or uids", ("start", "--sink", "crm", "--yes")),
        (2, "in the future", ("start", "--sink", "crm", "--since", "2999-01-01T00:00:00Z", "--yes")),
        (2, "in the future", ("start", "--sink", "crm", "--since", "1h", "--until", "2999-01-01T00:00:00Z", "--yes")),
        (2, "is after until", ("start", "--sink", "crm", "--since", "1h", "--until", "2h", "--yes")),
        (2, "should be a number", ("start", "--sink", "crm", "--since", "1h", "--rate", "0")),
        (2, "should be a UUID", ("start", "--sink", "crm", "--uid", "x")),
        (3, f"there is no event {UNKNOWN}", ("start", "--sink", "crm", "--uid", UNKNOWN)),
        (0, "no replay was started", ("start", "--sink", "crm", "--uid", uid)),
        (3, "there is no replay 7", ("show", "7")),
        (3, "there is no replay 7", ("pause", "7")),
        (2, "should be a number", ("show", "x")),
    ]
    for code, message, arguments in cases:
        ended = command(database, *arguments)
        assert (ended.code, ended.out) == (code, ""), arguments
        assert message in ended.err, arguments
    assert query(database, "select from outbox.replay") == []
