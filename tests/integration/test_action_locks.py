"""Locks of actions: they end with an idle transaction, and meet rebases and migrations without a deadlock."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.database import Database
from tests.support.lock_waits import SECONDS, begun
from tests.support.sink_actions import register

ACTIONS = [
    "select from outbox.discard_deliveries('{}', reason => 'x')",
    "select from outbox.drop_sink('s', false, 1, 'x', null)",
    "select from outbox.seek_sink('s', 'now', 'x', null)",
]
IDLE = "select set_config('idle_in_transaction_session_timeout', %s, false)"


def idle_after(database: Database, action: str, before: str) -> tuple[Any, ...]:
    """Return the limit of an idle transaction behind an action, and after its transaction."""
    show = b"show idle_in_transaction_session_timeout"
    with database.connect(autocommit=True) as connection:
        connection.execute(IDLE, (before,))
        with connection.transaction():
            connection.execute(action.encode())
            [(inside,)] = connection.execute(show).fetchall()
        [(after,)] = connection.execute(show).fetchall()
    return inside, after


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_in_a_transaction_left_idle_does_not_keep_its_locks(database: Database, action: str) -> None:
    register(database, "s")
    assert idle_after(database, action, "0") == ("5s", "0")


def test_only_a_longer_limit_of_the_session_is_replaced(database: Database) -> None:
    register(database, "s")
    assert idle_after(database, ACTIONS[0], "3s") == ("3s", "3s")
    assert idle_after(database, ACTIONS[0], "1h") == ("5s", "1h")


def test_an_idle_transaction_ends_with_its_locks(database: Database) -> None:
    register(database, "s")
    with database.connect() as idle, database.connect() as relay:
        idle.execute(ACTIONS[1].encode())
        relay.execute("set lock_timeout = '20s'")
        relay.execute("lock table outbox.sink in share row exclusive mode")
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            idle.execute("select 1")


@pytest.mark.parametrize(
    "action",
    [
        ACTIONS[-1],
        "select from outbox.preview_seek('s', 'now', 10, 5)",
        "select from outbox.preview_removal('s', 10, 5, 5)",
    ],
)
def test_an_action_on_a_sink_waits_for_a_rebase_without_a_deadlock(database: Database, action: str) -> None:
    register(database, "s")
    with database.connect() as rebase:
        rebase.execute("lock table outbox.event in access exclusive mode")  # what rebase does first of all
        with begun(database, lambda connection: connection.execute(action.encode())) as acted:
            rebase.execute("lock table outbox.sink in access exclusive mode")
            rebase.commit()
            acted.result(SECONDS)
