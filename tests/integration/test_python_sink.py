"""A relay as a process with a Python sink: what becomes of events whose handlers misbehave, and of their processes."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.emitting import emit_payload
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.work]
type = "python"
handler = "tests.support.handlers:{handler}"
timeout_seconds = {timeout}
max_memory_mb = 200
{more}
[sinks.work.retry]
attempts = 2
base_seconds = 0.1
max_seconds = 0.2
[sinks.work.circuit]
open_after = 1000
probe_seconds = 0.2
probe_max_seconds = 0.5
[routes]
"*" = ["work"]
"""
ROWS = "select uid::text, state::text, attempts, last_error from outbox.delivery order by id"
SECONDS = 60


def relay_of(
    database: Database, directory: Path, handler: str, *, timeout: float = 1, more: str = "", **expected: Any
) -> RelayService:
    text = CONFIG.format(dsn=database.dsn, handler=handler, timeout=timeout, more=more)
    return RelayService(directory, text, HANDLERS_DIRECTORY=str(directory), **expected)


def received(directory: Path) -> list[str]:
    """Return the uids that handlers have recorded."""
    file = directory / "received"
    return [json.loads(line)["uid"] for line in file.read_text().splitlines()] if file.exists() else []


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def dead_row(database: Database, uid: str) -> tuple[Any, ...]:
    return next((row for row in query(database, ROWS) if row[:2] == (uid, "dead")), ())


FAILURES = {
    "raise": "ValueError: xxxx",
    "base": "Abrupt: abrupt",
    "exit": "SystemExit: 3",
    "die": "its worker ended: it ended with exit status 4",
    "eat": "more than max_memory_mb",
    "block": "",
}


@pytest.mark.parametrize("handler", ["asynchronous", "plain"])
@pytest.mark.parametrize("what", FAILURES)
def test_an_event_that_harms_its_worker_ends_dead_and_its_neighbours_arrive(
    database: Database, tmp_path: Path, handler: str, what: str
) -> None:
    with relay_of(database, tmp_path, handler, timeout=10 if what == "eat" else 1) as relay:
        bad = emit_payload(database, json.dumps(what), "bad")
        good = [emit_payload(database, '"fine"', f"k{n}") for n in range(20)]
        row = until(lambda: dead_row(database, bad), seconds=SECONDS, what="the event is dead")
        until(lambda: set(good) <= set(received(tmp_path)), seconds=SECONDS, what="the others arrive")
        assert row[2] == 2
        assert FAILURES[what] in row[3]
        assert len(row[3]) <= 200
        assert bad not in received(tmp_path)
        assert relay.stop() == 0


@pytest.mark.parametrize("handler", ["asynchronous", "plain"])
def test_a_handler_that_asks_for_a_retry_is_called_again_and_one_that_refuses_is_not(
    database: Database, tmp_path: Path, handler: str
) -> None:
    with relay_of(database, tmp_path, handler) as relay:
        again, refused = emit_payload(database, '"retry"', "a"), emit_payload(database, '"dead"', "b")
        until(lambda: again in received(tmp_path), seconds=SECONDS, what="it is delivered at the second attempt")
        row = until(lambda: dead_row(database, refused), seconds=SECONDS, what="the refused one is dead")
        assert row[2:] == (1, "the handler refused the event: no such customer")
        lines = [json.loads(line) for line in (tmp_path / "received").read_text().splitlines()]
        assert [line["attempt"] for line in lines if line["uid"] == again] == [2]
        assert relay.stop() == 0


@pytest.mark.parametrize("what", ["sleep", "stubborn"])
def test_an_asynchronous_handler_that_does_not_end_fails(database: Database, tmp_path: Path, what: str) -> None:
    with relay_of(database, tmp_path, "asynchronous") as relay:
        bad, good = emit_payload(database, json.dumps(what), "bad"), emit_payload(database, '"fine"', "good")
        row = until(lambda: dead_row(database, bad), seconds=SECONDS, what="the event is dead")
        assert "the handler did not end in time" in row[3]
        until(lambda: good in received(tmp_path), seconds=SECONDS, what="the other arrives")
        assert relay.stop() == 0


def test_an_extended_delivery_outlasts_the_limit_and_is_made_once(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "asynchronous") as relay:
        uid = emit_payload(database, '"extend"', "a")
        left = "select extract(epoch from lease_until - clock_timestamp())::float from outbox.delivery"
        long = "the lease is longer than the limit and its margin"
        until(lambda: any(seconds > 7 for (seconds,) in query(database, left)), seconds=SECONDS, what=long)
        until(lambda: received(tmp_path), seconds=SECONDS, what="it is delivered")
        until(lambda: not query(database, ROWS), seconds=SECONDS, what="it is settled")
        assert received(tmp_path) == [uid]
        assert relay.stop() == 0


def test_what_a_handler_prints_closes_or_forks_hurts_no_other_event(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "asynchronous") as relay:
        printed, forked = emit_payload(database, '"print"', "a"), emit_payload(database, '"fork"', "b")
        emit_payload(database, '"close"', "c")
        once = emit_payload(database, '"die once"', "e")
        good = [emit_payload(database, '"fine"', f"k{n}") for n in range(10)]
        wanted = {printed, forked, once, *good}
        until(lambda: wanted <= set(received(tmp_path)), seconds=SECONDS, what="they arrive")
        assert relay.stop() == 0
    lines = relay.log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    printed_lines = [line["line"] for line in relay.lines() if line["event"] == "handler.output"]
    assert "printed" in printed_lines
    assert all(line.isprintable() for line in printed_lines)
    assert not any(line["event"] == "false" for line in relay.lines())


@pytest.mark.parametrize("what", ["fine", "block"])
def test_no_worker_outlives_a_relay_that_is_killed(database: Database, tmp_path: Path, what: str) -> None:
    relay = relay_of(database, tmp_path, "asynchronous", timeout=60).start()
    emit_payload(database, json.dumps(what), "a")
    until((tmp_path / "pids").exists, seconds=SECONDS, what="the handler is called")
    pids = [int(line) for line in until((tmp_path / "pids").read_text, seconds=SECONDS, what="its pid").splitlines()]
    relay.kill()
    until(lambda: not any(map(is_alive, pids)), seconds=10, what="no worker is left")


def test_events_of_a_key_keep_their_order_while_workers_are_killed(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "asynchronous", timeout=10, more="workers = 2") as relay:
        uids = [emit_payload(database, '"fine"', f"k{n % 3}") for n in range(60)]
        until(lambda: len(received(tmp_path)) > 5, seconds=SECONDS, what="some arrive")
        for pid in set((tmp_path / "pids").read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        uids += [emit_payload(database, '"fine"', f"k{n % 3}") for n in range(60)]
        until(lambda: set(uids) <= set(received(tmp_path)), seconds=SECONDS, what="all arrive")
        assert relay.stop() == 0
    first = list(dict.fromkeys(received(tmp_path)))
    for key in range(3):
        of_key = set(uids[key::3])
        assert [uid for uid in first if uid in of_key] == uids[key::3]


# -- transactions -------------------------------------------------------------------------------------------------

EFFECTS = "select uid::text from effects order by uid"


def create_effects(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create table effects (uid uuid)")


def effects_of(database: Database) -> list[str]:
    return [uid for (uid,) in query(database, EFFECTS)]


@pytest.mark.parametrize("handler", ["transactional", "atransactional"])
@pytest.mark.parametrize("victim", ["worker", "relay"])
@pytest.mark.parametrize("step", ["before", "after"])
def test_an_effect_is_had_once_whatever_is_killed(
    database: Database, tmp_path: Path, handler: str, victim: str, step: str
) -> None:
    create_effects(database)
    more = f'dsn = "{database.dsn}"\ntransaction = true'
    relay = relay_of(database, tmp_path, handler, timeout=10, more=more)
    relay.start()
    uids = [emit_payload(database, json.dumps(f"{victim} {step}"), "a"), emit_payload(database, '"fine"', "a")]
    if victim == "relay":
        assert relay.ended(SECONDS) == -signal.SIGKILL
        relay.start()
    with relay:
        until(lambda: set(uids) <= set(effects_of(database)), seconds=SECONDS, what="both have their effect")
        backlog = "select count(*) from outbox.delivery"
        until(lambda: query(database, backlog) == [(0,)], seconds=SECONDS, what="they are settled")
        assert effects_of(database) == sorted(uids)
        assert relay.stop() == 0
    assert query(database, "select count(*) from outbox.inbox") == [(2,)]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("commit", "ProgrammingError: Explicit commit() forbidden"),
        ("commit statement", "TransactionEnded: a handler must not end"),
        ("hidden failure", "TransactionEnded: a statement of the handler failed"),
    ],
)
def test_a_handler_that_ends_its_transaction_fails_without_an_effect(
    database: Database, tmp_path: Path, what: str, error: str
) -> None:
    create_effects(database)
    with relay_of(database, tmp_path, "transactional", more=f'dsn = "{database.dsn}"\ntransaction = true') as relay:
        uid = emit_payload(database, json.dumps(what), "a")
        row = until(lambda: dead_row(database, uid), seconds=SECONDS, what="it is dead")
        assert row[3].startswith(error)
        assert effects_of(database) == []
        assert query(database, "select count(*) from outbox.inbox") == [(0,)]
        assert relay.stop() == 0


# -- the configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        ("tests.support.missing:send", "there is no module tests.support.missing"),
        ("tests.support.handlers:missing", "the module tests.support.handlers has no missing"),
        ("tests.support.handlers:POISON", "is not callable: it is of type bytes"),
        ("tests.support.handlers:no_argument", "has a wrong signature"),
        ("tests.support.handlers:Abrupt", "is a class"),
    ],
)
def test_a_handler_that_cannot_be_called_is_named_by_the_check_and_by_status(
    database: Database, tmp_path: Path, handler: str, sentence: str
) -> None:
    text = CONFIG.format(dsn=database.dsn, handler="plain", timeout=1, more="")
    text = text.replace("tests.support.handlers:plain", handler)
    with RelayService(tmp_path, text, HANDLERS_DIRECTORY=str(tmp_path)) as relay:
        checked = outbox_relay("check", "--online", "-c", relay.config)
        assert (checked.code, checked.out) == (2, "")
        assert "sinks.work: handler" in checked.err + checked.out
        assert sentence in checked.err + checked.out

        def last_error() -> str:
            return outbox_relay("status", "--json", "-c", relay.config).json["sinks"]["work"]["last_error"] or ""

        until(lambda: sentence in last_error(), seconds=SECONDS, what="status says it")
        assert any(sentence in str(line.get("reason")) for line in relay.lines())
        assert relay.stop() == 0


def test_a_reload_replaces_the_handler(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "missing") as relay:
        uid = emit_payload(database, '"fine"', "a")
        relay.config.write_text(relay.config.read_text().replace(":missing", ":plain"))
        relay.send(signal.SIGHUP)
        until(lambda: uid in received(tmp_path), seconds=SECONDS, what="it arrives")
        relay.expects = {"reload"}
        assert relay.stop() == 0


def test_calls_of_a_plain_handler_do_not_spend_their_time_waiting_for_a_thread(
    database: Database, tmp_path: Path
) -> None:
    """A worker has at most 64 threads, and the sink may have more events in flight."""
    query(database, "select outbox.emit('order.made', '\"brief\"', key => n::text) from generate_series(1, 150) n")
    with relay_of(database, tmp_path, "plain", more="max_in_flight = 500") as relay:
        until(lambda: len(received(tmp_path)) >= 150, seconds=SECONDS, what="every event was handled")
        assert relay.stop() == 0
    assert len(received(tmp_path)) == 150
    assert query(database, "select outcome from outbox.attempt where outcome <> 'delivered'") == []
