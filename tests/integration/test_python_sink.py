"""A relay as a process with a Python sink: what becomes of events whose handlers misbehave, and of the relay."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.emitting import emit_payload
from tests.support.metrics import scrape, value_of
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


def lines(directory: Path) -> list[dict[str, Any]]:
    """Return what handlers have recorded."""
    file = directory / "received"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def received(directory: Path) -> list[str]:
    """Return the uids that handlers have recorded."""
    return [line["uid"] for line in lines(directory)]


def calls(directory: Path) -> list[str]:
    """Return what was asked of each call of a handler."""
    file = directory / "calls"
    return file.read_text().splitlines() if file.exists() else []


def fault_of(relay: RelayService) -> str | None:
    body = relay.ask("/readyz")[1]
    return body["sinks"].get("work", {}).get("fault") if body else None


def last_error(relay: RelayService) -> str:
    """Return what `status` says of the sink."""
    return outbox_relay("status", "--json", "-c", relay.config).json["sinks"]["work"]["last_error"] or ""


def dead_row(database: Database, uid: str) -> tuple[Any, ...]:
    return next((row for row in query(database, ROWS) if row[:2] == (uid, "dead")), ())


FAILURES = {
    "raise": "ValueError at support/handlers.py:",
    "exit": "SystemExit at support/handlers.py:",
    "dead": "the handler refused the event: no such customer",
}
TIMED_OUT = "the handler did not end in time"


@pytest.mark.parametrize(("handler", "hangs"), [("asynchronous", "sleep"), ("plain", "block")])
def test_events_that_fail_end_dead_and_their_neighbours_arrive(
    database: Database, tmp_path: Path, handler: str, hangs: str
) -> None:
    expected = {**FAILURES, hangs: TIMED_OUT}
    with relay_of(database, tmp_path, handler) as relay:
        bad = {what: emit_payload(database, json.dumps(what), what) for what in expected}
        again = emit_payload(database, '"retry"', "again")
        good = [emit_payload(database, '"fine"', f"k{n}") for n in range(20)]
        rows = {
            what: until(lambda uid=uid: dead_row(database, uid), seconds=SECONDS, what=f"the event is dead: {what}")
            for what, uid in bad.items()
        }
        until(lambda: {again, *good} <= set(received(tmp_path)), seconds=SECONDS, what="the others arrive")
        assert {what: row[2] for what, row in rows.items()} == {what: 1 if what == "dead" else 2 for what in expected}
        assert [what for what, row in rows.items() if expected[what] not in row[3] or len(row[3]) > 200] == []
        assert set(bad.values()).isdisjoint(received(tmp_path))
        answers = query(database, "select detail ->> 'answer' from outbox.attempt where uid = %s", bad["raise"])
        assert [text[:16] for (text,) in answers] == ["ValueError: xxxx"] * 2
        assert "xxxx" not in relay.log.read_text(), "a message may repeat the payload"
        assert [line["attempt"] for line in lines(tmp_path) if line["uid"] == again] == [2]
        assert relay.stop() == 0


def test_a_relay_whose_handler_hangs_goes_on_with_other_threads_and_exits_when_all_hang(
    database: Database, tmp_path: Path
) -> None:
    with relay_of(database, tmp_path, "plain", more="max_in_flight = 8") as relay:
        hanging = [emit_payload(database, '"block"', "h")]
        trouble = "2 of 8 calls have not ended in time, and cannot be ended"
        until(lambda: trouble in last_error(relay), seconds=SECONDS, what="status says how many hang")
        good = [emit_payload(database, '"fine"', f"k{n % 10}") for n in range(300)]
        until(lambda: set(good) <= set(received(tmp_path)), seconds=SECONDS, what="the others are handled")
        assert [received(tmp_path).count(uid) for uid in good] == [1] * 300
        assert (relay.ask("/readyz")[0], fault_of(relay)) == (200, None)
        assert value_of(scrape(relay.port)[1], "outbox_calls_hanging", sink="work") == 2
        assert relay.ask("/readyz")[1]["sinks"]["work"]["trouble"] == trouble
        hanging += [emit_payload(database, '"block"', f"h{n}") for n in range(20)]
        assert relay.ended(SECONDS) == 1
        [reason] = [line["reason"] for line in relay.lines() if line["event"] == "relay.gave_up"]
        assert "sink work: 8 of 8 calls have not ended in time, and cannot be ended" in reason
    rows = query(database, "select uid::text from outbox.delivery where attempts > 0")
    assert len(rows) >= 4, "the attempts of those that hang are counted, so that each ends dead"
    assert {uid for (uid,) in rows} <= {*hanging}


"""The tenants of events by their payloads. The last one is scheduled."""


def test_the_lease_of_an_extended_delivery_is_extended_and_it_is_made_once(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "asynchronous", more="max_in_flight_total = 3") as relay:
        uid = emit_payload(database, '"extend"', "a")
        left = "select extract(epoch from lease_until - clock_timestamp())::float from outbox.delivery"
        long = "the lease is longer than the limit and its margin"
        until(lambda: any(seconds > 7 for (seconds,) in query(database, left)), seconds=SECONDS, what=long)
        (tmp_path / "extended").touch()
        until(lambda: received(tmp_path), seconds=SECONDS, what="it is delivered")
        until(lambda: not query(database, ROWS), seconds=SECONDS, what="it is settled")
        assert received(tmp_path) == [uid]
        assert relay.stop() == 0


def test_a_stop_lets_a_handler_end(database: Database, tmp_path: Path) -> None:
    with relay_of(database, tmp_path, "plain", timeout=30) as relay:
        uid = emit_payload(database, '"brief"', "a")
        until(lambda: calls(tmp_path), seconds=SECONDS, what="the handler is called")
        assert relay.stop() == 0
    assert received(tmp_path) == [uid]
    assert query(database, ROWS) == []


# -- transactions -------------------------------------------------------------------------------------------------

END_WAITING = """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                  where datname = current_database() and wait_event_type = 'Lock'"""
"""End the statements of a relay that was killed: the server would still run them."""
EFFECTS = "select uid::text from effects order by uid"


def create_effects(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("create table effects (uid uuid)")


def effects_of(database: Database) -> list[str]:
    return [uid for (uid,) in query(database, EFFECTS)]


@pytest.mark.parametrize(("handler", "step"), [("transactional", "before"), ("atransactional", "after")])
def test_an_effect_is_had_once_although_the_relay_is_killed(
    database: Database, tmp_path: Path, handler: str, step: str
) -> None:
    create_effects(database)
    relay = relay_of(database, tmp_path, handler, timeout=10, more=f'dsn = "{database.dsn}"\ntransaction = true')
    relay.start()
    uids = [emit_payload(database, json.dumps(step), "a"), emit_payload(database, '"fine"', "a")]
    assert relay.ended(SECONDS) == -signal.SIGKILL
    with relay.start():
        until(lambda: set(uids) <= set(effects_of(database)), seconds=SECONDS, what="both have their effect")
        backlog = "select count(*) from outbox.delivery"
        until(lambda: query(database, backlog) == [(0,)], seconds=SECONDS, what="they are settled")
        assert effects_of(database) == sorted(uids)
        assert relay.stop() == 0
    assert query(database, "select count(*) from outbox.inbox") == [(2,)]


@pytest.mark.fence("a relay is killed between the effect of a handler and its settlement")
@pytest.mark.parametrize("handler", [pytest.param("transactional", marks=pytest.mark.slow), "atransactional"])
def test_an_effect_is_had_once_although_the_relay_is_killed_before_it_settles(
    database: Database, tmp_path: Path, handler: str
) -> None:
    """The effect is committed, and no position or row says so."""
    create_effects(database)
    relay = relay_of(database, tmp_path, handler, timeout=10, more=f'dsn = "{database.dsn}"\ntransaction = true')
    relay.start()
    unsettled = "select events from outbox_internal.backlog('work', null, 1000, 5.0)"
    first = emit_payload(database, '"fine"', "a")
    until(lambda: effects_of(database) == [first], seconds=SECONDS, what="it has positions")
    until(lambda: query(database, unsettled) == [(0,)], seconds=SECONDS, what="the first event is settled")
    with database.connect() as holder:
        holder.execute("lock table outbox.progress, outbox.delivery in share mode")
        uid = emit_payload(database, '"fine"', "a")
        until(lambda: effects_of(database) == [first, uid], seconds=SECONDS, what="the effect is committed")
        relay.kill()
        holder.execute(END_WAITING.encode())
    assert query(database, unsettled) == [(1,)]
    query(database, "update outbox.session set lease_until = now() returning 1")
    with relay.start():
        until(lambda: query(database, unsettled) == [(0,)], seconds=SECONDS, what="the event is settled")
        assert relay.stop() == 0
    assert effects_of(database) == [first, uid]


# -- the configuration --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_handler_that_cannot_be_called_is_named_by_the_check_by_status_and_by_readyz(
    database: Database, tmp_path: Path
) -> None:
    sentence = "handler tests.support.handlers:missing: the module tests.support.handlers has no missing"
    with relay_of(database, tmp_path, "missing").start(wait=False) as relay:
        until(lambda: fault_of(relay) == sentence, seconds=SECONDS, what="the relay is not ready, and says why")
        assert relay.ask("/readyz")[0] == 503
        assert relay.ask("/livez")[0] == 200
        checked = outbox_relay("check", "--online", "-c", relay.config)
        assert (checked.code, checked.out) == (2, "")
        assert f"sinks.work: {sentence}" in checked.err
        until(lambda: sentence in last_error(relay), seconds=SECONDS, what="status says it")
        assert any(sentence in str(line.get("reason")) for line in relay.lines())
        relay.config.write_text(relay.config.read_text().replace(":missing", ":plain"))
        uid = emit_payload(database, '"fine"', "a")
        relay.send(signal.SIGHUP)
        until(lambda: uid in received(tmp_path), seconds=SECONDS, what="the handler of the reload is called")
        until(lambda: relay.ready, seconds=SECONDS, what="the relay is ready")
        relay.expects = {"reload"}
        assert relay.stop() == 0
