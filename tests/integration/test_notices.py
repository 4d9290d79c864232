"""Notices: made in the transaction of what they tell, at most one per cause and hour, and never at its expense."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.notices import RECEIVER, die, notice_types, notices, pass_hours, register_receiver
from tests.support.roles import new_role
from tests.support.sink_actions import call, register

DEAD, PAUSED, RECOVERED = "outbox.dead", "outbox.sink.paused", "outbox.sink.recovered"
SECONDS = 20


@pytest.fixture
def told(database: Database) -> Database:
    """Return a database with a sink `crm` for every type, and one that receives notices alone."""
    register(database, "crm")
    register_receiver(database)
    return database


def set_paused(database: Database, paused: bool, sink: str = "crm") -> None:
    """Pause or resume a sink as an operator does."""
    call(database, "select outbox.set_paused(%s, %s, 'anna', 'maintenance')", sink, paused)


def dies(database: Database, sink: str, *classes: str, first: int = 1) -> None:
    """Insert dead rows in a transaction of their own."""
    with database.connect() as connection:
        die(connection, sink, *classes, first=first)


# -- reserved types ------------------------------------------------------------------------------------------------


@pytest.mark.fence("an application passes for the relay, or a sink for every type gets notices")
def test_no_application_emits_a_reserved_type(told: Database) -> None:
    with new_role(told, "app") as app:
        migrate(told.dsn, grant_emit=[app])
        with told.connect(user=app, autocommit=True) as connection:
            for call_ in (
                "select outbox.emit('outbox.dead', '1')",
                "select outbox.emit('outbox.', '1', uid => gen_random_uuid())",
                "select outbox.emit_raw('outbox.anything', '1', headers => '{\"a\": \"b\"}')",
            ):
                with pytest.raises(errors.InvalidParameterValue, match=r"type outbox\.\w* is reserved"):
                    connection.execute(call_.encode())
            fine = [outbox.Event("order.made", 1), outbox.Event("outbox.x", 2)]
            named = r"event 1: type outbox\.x is reserved"
            with connection.transaction(), pytest.raises(outbox.InvalidEvent, match=named):
                outbox.emit_many(connection, fine)
            for other in ("outbox", "outboxes.made", "Outbox.made", "my.outbox.dead"):
                connection.execute("select outbox.emit(%s, '1')", (other,))
    assert notices(told) == []


def test_no_role_makes_notices_of_its_own(told: Database) -> None:
    with new_role(told, "app") as app, new_role(told, "relay") as relay, new_role(told, "ops") as operator:
        migrate(told.dsn, grant_emit=[app], grant_relay=[relay], grants={"operate": [operator]})
        for role in (app, relay, operator):
            with told.connect(user=role, autocommit=True) as connection:
                # A notice that cannot be written fails nothing, so a call is refused, or has no effect.
                for call_ in (
                    "select outbox_internal.make_notice('outbox.dead', 'crm', 'x', '{}')",
                    "select outbox_internal.notify_state('crm', 'paused', true, '{}')",
                ):
                    with suppress(errors.InsufficientPrivilege):
                        connection.execute(call_.encode())
                with pytest.raises(errors.InsufficientPrivilege):
                    connection.execute(
                        "insert into outbox.event (shard, uid, type, content_type) "
                        "values (0, gen_random_uuid(), 'outbox.dead', 'x')"
                    )
        with told.connect(user=relay, autocommit=True) as connection:
            assert connection.execute("select sink from outbox_internal.notify_sinks(300)").fetchall() == [
                ("crm",),
                ("ops",),
            ]
            for wrong in ("null", "0", "'nan'", "'infinity'", "-1"):
                with pytest.raises(errors.InvalidParameterValue, match="lagging_seconds must be"):
                    connection.execute(f"select outbox_internal.notify_sinks({wrong})".encode())
    assert notices(told) == []


# -- dead letters --------------------------------------------------------------------------------------------------


def test_dead_letters_of_a_class_make_one_notice_an_hour_with_their_number(told: Database) -> None:
    dies(told, "crm", "http_400", "http_400", "http_400", "redirect")
    found = {payload["reason"]: payload for _, payload in notices(told)}
    assert notice_types(told) == [DEAD, DEAD]
    [(uid, kind)] = query(told, "select uid::text, type from outbox.delivery where id = 1")
    at = found["http_400"].pop("at")
    assert found["http_400"] == {
        "sink": "crm", "reason": "http_400", "status": 400, "count": 3, "dead": 4, "exact": True, "uid": uid,
        "type": kind,
    }  # fmt: skip
    assert at.endswith("+00:00")
    assert found["redirect"]["count"] == 1
    dies(told, "crm", "http_400", first=10)
    assert len(notices(told)) == 2
    pass_hours(told, 1)
    dies(told, "crm", "http_400", first=20)
    assert [(n[1]["reason"], n[1]["count"], n[1]["dead"]) for n in notices(told)][2:] == [("http_400", 2, 6)]
    dumped = query(
        told, "select string_agg(payload::text || key || coalesce(headers::text, ''), ' ') from outbox.event"
    )
    assert "CANARY" not in str(dumped)
    assert b"CANARY".hex() not in str(dumped)


@pytest.mark.fence("a notice cannot be written, or two relays write the same")
def test_settlements_with_two_causes_in_opposite_orders_are_no_deadlock(told: Database) -> None:
    barrier = threading.Barrier(2)
    failed: list[BaseException] = []

    def settle(first: int, *classes: str) -> None:
        try:
            with told.connect() as connection:
                die(connection, "crm", classes[0], first=first)
                barrier.wait(SECONDS)
                die(connection, "crm", classes[1], first=first + 1)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=settle, args=(1, "http_400", "http_404")),
        threading.Thread(target=settle, args=(101, "http_404", "http_400")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failed
    assert query(told, "select count(*) from outbox.delivery") == [(4,)]
    assert sorted(n[1]["reason"] for n in notices(told)) == ["http_400", "http_404"]


# -- a notice that cannot be written -------------------------------------------------------------------------------


@pytest.mark.fence("a notice cannot be written, or two relays write the same")
def test_a_notice_that_cannot_be_written_fails_nothing(told: Database) -> None:
    with told.connect() as holder:
        holder.execute("lock table outbox.event in share row exclusive mode")
        began = time.monotonic()
        set_paused(told, True)
        dies(told, "crm", *(f"http_{n}" for n in range(400, 500)))
        assert time.monotonic() - began < 3
        holder.rollback()
    assert query(told, "select paused from outbox.sink where name = 'crm'") == [(True,)]
    assert query(told, "select count(*) from outbox.delivery") == [(100,)]
    assert notices(told) == []
    call(told, "select * from outbox_internal.notify_sinks(300)")
    assert notice_types(told) == [PAUSED], "what was not told is told later"


# -- the receiver itself -------------------------------------------------------------------------------------------


@pytest.mark.fence("a notice about the receiver of notices causes another")
def test_nothing_is_told_of_the_receiver_itself(told: Database) -> None:
    set_paused(told, True, RECEIVER)
    dies(told, RECEIVER, "http_400")
    call(told, "insert into outbox.shard (sink, shard) values ('ops', 0) on conflict do nothing")
    call(told, "select * from outbox_internal.notify_sinks(300)")
    set_paused(told, False, RECEIVER)
    assert notices(told) == []


# -- pauses --------------------------------------------------------------------------------------------------------


def test_a_pause_and_its_end_are_told_with_who_and_why(told: Database) -> None:
    set_paused(told, True)
    set_paused(told, False)
    (paused, first), (recovered, second) = notices(told)
    assert (paused, recovered) == (PAUSED, RECOVERED)
    assert first.pop("at")
    assert second.pop("at")
    assert first == {"sink": "crm", "reason": "maintenance", "actor": "anna", "role": "postgres"}
    assert second.pop("since")
    assert second == {"sink": "crm", "from": "paused", "seconds": 0, "actor": "anna"}
    keys = query(told, "select distinct key, content_type from outbox.event where type ^@ 'outbox.'")
    assert keys == [("crm", None)]


def test_what_the_hour_suppresses_is_told_when_it_is_over_if_it_lasts(told: Database) -> None:
    for paused in (True, False, True, False, True):
        set_paused(told, paused)
    assert notice_types(told) == [PAUSED, RECOVERED]
    call(told, "select * from outbox_internal.notify_sinks(300)")
    assert notice_types(told) == [PAUSED, RECOVERED], "within the hour"
    pass_hours(told, 1)
    call(told, "select * from outbox_internal.notify_sinks(300)")
    call(told, "select * from outbox_internal.notify_sinks(300)")
    assert notice_types(told) == [PAUSED, RECOVERED, PAUSED]
    set_paused(told, False)
    assert notice_types(told)[3:] == [RECOVERED]


def test_old_causes_are_forgotten_and_states_are_kept(told: Database) -> None:
    set_paused(told, True)
    dies(told, "crm", "http_400", "http_404")
    pass_hours(told, 25)
    dies(told, "crm", "http_500", first=10)
    kept = query(told, "select type, cause from outbox.notice order by 1, 2")
    assert kept == [(DEAD, "http_500"), (PAUSED, "paused")]
