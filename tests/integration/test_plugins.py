"""A relay as a process with plug-ins that misbehave: what becomes of their events, and of the other sinks."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.emitting import emit_payload, emit_types
from tests.support.plugin_package import write_plugin
from tests.support.receiver import Receiver
from tests.support.receiver.received import received_types
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService
from tests.support.wait import until

CANARY = "canary-7f3a91"
ODD = f"""
def act(payload):
    match payload:
        case "raise": raise ValueError(payload, {CANARY!r})
        case "exit": sys.exit(3)
        case "hang": time.sleep(3600)
        case "block": time.sleep(2)
        case "none": return None
        case "refuse": return [Refused("no, " + payload + " {CANARY}", 10**30)]
        case _: return [DELIVERED]


class Odd(Good):
    def deliver(self, events, deadline):
        answers = [act(event.payload.decode().strip('"')) for event in events]
        if not all(isinstance(answer, list) for answer in answers):
            return next(answer for answer in answers if not isinstance(answer, list))
        verdicts = sum(answers, [])
        super().deliver([event for event, verdict in zip(events, verdicts) if verdict is DELIVERED], deadline)
        return verdicts


class OddBatches(Odd):
    keeps_order, max_batch, max_in_flight = True, 10, 2
"""
CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.odd]
type = "odd"
file = "{directory}/received"
token = "{canary}"
timeout_seconds = 0.5
[sinks.odd.retry]
attempts = 2
base_seconds = 0.1
max_seconds = 0.2
[sinks.odd.circuit]
open_after = 1000
probe_seconds = 0.1
probe_max_seconds = 0.2
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
[routes]
"order.*" = ["odd"]
"a.*" = ["crm"]
"""
ROWS = (
    "select uid::text, attempts, last_error, last_status, last_attempt::text from outbox.delivery where state = 'dead'"
)
SECONDS = 60
HARMFUL = {
    "raise": "raised ValueError at ",
    "exit": "raised SystemExit at ",
    "block": "did not answer within 0.5 s",
    "none": "returned None in place of a list of verdicts",
    "refuse": "no, … …",
}


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def relay_of(
    database: Database, receiver: Receiver, directory: Path, name: str = "Odd", code: str = ODD, **expected: Any
) -> RelayService:
    write_plugin(directory, "odd", code, name)
    values = {"dsn": database.dsn, "directory": directory, "canary": CANARY, "url": receiver.url, "secret": SECRET}
    return RelayService(directory, CONFIG.format(**values), PYTHONPATH=str(directory), **expected)


def delivered(directory: Path) -> set[str]:
    file = directory / "received"
    return set(file.read_text().split()) if file.exists() else set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Odd", "OddBatches"])
def test_events_that_harm_a_plugin_end_dead_with_the_reason_and_all_others_arrive(
    database: Database, receiver: Receiver, tmp_path: Path, name: str
) -> None:
    harmful = {**HARMFUL, **({"hang": "did not answer within 0.5 s"} if name == "Odd" else {})}
    with relay_of(database, receiver, tmp_path, name) as relay:
        bad = {emit_payload(database, json.dumps(what), what): what for what in harmful}
        good = {emit_payload(database, '"fine"', f"k{n}") for n in range(20)}
        emit_types(database, "a.x")
        until(lambda: received_types(receiver) == ["a.x"], seconds=SECONDS, what="the other sink delivers")
        rows = until(lambda: dead(database, len(bad)), seconds=SECONDS, what="the harmful events are dead")
        until(lambda: delivered(tmp_path) == good, seconds=SECONDS, what="the others arrive")
        for uid, what in bad.items():
            attempts, error, status, attempt = rows[uid]
            assert harmful[what] in error
            assert (attempts, status) == (1 if what == "refuse" else 2, None)
            assert CANARY not in f"{error}{attempt}"
        assert relay.ready
        assert relay.stop() == 0
        assert CANARY not in relay.log.read_text()


@pytest.mark.slow
def test_a_relay_with_a_plugin_that_blocks_endlessly_stops(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    code = "class Odd(Good):\n    def deliver(self, events, deadline): time.sleep(3600)"
    with relay_of(database, receiver, tmp_path, code=code) as relay:
        emit_payload(database, '"fine"', "k")
        until(lambda: dead(database, 1), seconds=SECONDS, what="the event has failed")
        emit_types(database, "a.x")
        until(lambda: received_types(receiver) == ["a.x"], seconds=SECONDS, what="the other sink delivers")
        assert relay.stop() == 0


def dead(database: Database, count: int) -> dict[str, tuple[Any, ...]]:
    rows = {row[0]: row[1:] for row in query(database, ROWS)}
    return rows if len(rows) == count else {}


@pytest.mark.slow  # starts a relay process
def test_a_reload_with_a_broken_plugin_changes_nothing(database: Database, receiver: Receiver, tmp_path: Path) -> None:
    """The relay goes on with what it had: the plug-in that is imported, and the other sinks."""
    with relay_of(database, receiver, tmp_path, expects=["reload"]) as relay:
        write_plugin(tmp_path, "worse", "sys.exit(0)")
        working = relay.config.read_text()
        relay.config.write_text(working.replace('type = "odd"', 'type = "worse"'))
        relay.send(signal.SIGHUP)
        [line] = until(lambda: refusals(relay), seconds=SECONDS, what="the reload is refused")
        said = 'sinks.odd.type: the plug-in "worse" of plugin-worse 1.0 cannot be imported: plugin_worse:Good raised'
        assert said in line["reason"]
        uid = emit_payload(database, '"fine"', "k")
        emit_types(database, "a.x")
        until(lambda: received_types(receiver) == ["a.x"], seconds=SECONDS, what="the other sink delivers")
        until(lambda: uid in delivered(tmp_path), seconds=SECONDS, what="the plug-in delivers")
        relay.config.write_text(working.replace("timeout_seconds = 0.5", "timeout_seconds = 5"))
        relay.send(signal.SIGHUP)
        until(lambda: reloads(relay), seconds=SECONDS, what="a reload that is right is carried out")
        again = emit_payload(database, '"fine"', "k")
        until(lambda: again in delivered(tmp_path), seconds=SECONDS, what="the sink that was made again delivers")
        assert relay.stop() == 0


def refusals(relay: RelayService) -> list[dict[str, Any]]:
    return [line for line in relay.lines() if line.get("event") == "config.reload_refused"]


def reloads(relay: RelayService) -> list[dict[str, Any]]:
    return [line for line in relay.lines() if line.get("event") == "config.reloaded"]


@pytest.mark.slow
def test_a_replay_delivers_by_a_client_of_the_plugin_of_its_own(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    code = """
    class Odd(Good):
        def deliver(self, events, deadline):
            with self.settings.file.open("a") as file:
                file.writelines(f"{event.uid}:{self.context.replay}\\n" for event in events)
            return [DELIVERED for _ in events]
    """
    with relay_of(database, receiver, tmp_path, code=code) as relay:
        uid = emit_payload(database, '"fine"', "k")
        until(lambda: delivered(tmp_path) == {f"{uid}:None"}, seconds=SECONDS, what="it is delivered")
        command = ("replay", "start", "--sink", "odd", "--uid", uid, "--yes", "--dsn", database.dsn)
        until(lambda: outbox_relay(*command).code == 0, seconds=SECONDS, what="the replay begins")
        until(lambda: f"{uid}:1" in delivered(tmp_path), seconds=SECONDS, what="it is delivered again")
        assert relay.stop() == 0
