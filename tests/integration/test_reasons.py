"""Reasons that people give for their actions, in the audit."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from outbox_relay.cli.command import by
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.days import fill_days, keep
from tests.support.examples import register

REASON = "change 4711, approved by Ana"
ACTIONS: dict[str, tuple[str, ...]] = {
    "dead retry": ("dead", "retry", "--yes"),
    "dead discard": ("dead", "discard", "--yes"),
    "replay start": ("replay", "start", "--sink", "crm", "--since", "1h", "--to", "idle", "--yes"),
    "replay pause": ("replay", "pause", "1"),
    "replay resume": ("replay", "resume", "1"),
    "replay cancel": ("replay", "cancel", "1"),
    "sinks seek": ("sinks", "seek", "crm", "--to", "now", "--yes"),
    "sinks remove": ("sinks", "remove", "idle", "--yes"),
    "sinks forget": ("sinks", "remove", "idle", "--forget", "--yes"),
    "retention": ("retention", "run"),
    "rebase": ("rebase",),
    "pause": ("pause", "crm"),
    "resume": ("resume", "crm"),
}
"""The command of each action of the audit, in an order in which each changes something."""


def ask(database: Database, *arguments: str) -> Ended:
    """Run a command."""
    return inside(*arguments, "--dsn", database.dsn)


@pytest.fixture
def filled(database: Database) -> Database:
    """Return two sinks, two dead letters, an old day and a recent event."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 12)
        keep(connection, 5)
    register(database, "crm", "idle", pattern="*")
    query(database, "select outbox.emit('order.created', '{}')")
    query(
        database,
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at) "
        "select 'crm', id, shard, 'dead', true, now(), uid, type, coalesce(content_type, 'application/json'), "
        "created_at from outbox.event order by id limit 2 returning 1",
    )
    # Every sink has passed the log, so that nothing keeps the day and rows can be discarded.
    for sink in ("crm", "idle"):
        assert ask(database, "sinks", "seek", sink, "--to", "now", "--yes").code == 0
    return database


def newest(database: Database) -> dict[str, Any]:
    """Return the newest action."""
    return ask(database, "audit", "--limit", "1", "--json").json["audit"][0]


def test_every_action_records_who_did_it_and_why(filled: Database) -> None:
    """Goes red when a command does not hand its reason on, or another role than that of the session is recorded."""
    [(role,)] = query(filled, "select session_user::text")
    for action, command in ACTIONS.items():
        if action == "dead discard":
            query(filled, "update outbox.delivery set state = 'dead' returning 1")
        ended = ask(filled, *command, "--reason", REASON)
        assert (ended.code, ended.err.count("--reason")) == (0, 0), (action, ended)
        found = newest(filled)
        assert (found["action"], found["actor"], found["reason"]) == (
            action,
            by(Namespace(reason=REASON))["actor"],
            REASON,
        )
        assert found["role"] == role
    assert ask(filled, "audit").out.count(REASON) == len(ACTIONS)


@pytest.mark.slow  # every action, many times
def test_a_reason_that_the_audit_cannot_hold_is_refused_and_nothing_changes(filled: Database) -> None:
    for action in ("replay start", "pause"):  # for a replay to pause, and a sink to resume
        assert ask(filled, *ACTIONS[action]).code == 0
    recorded = query(filled, "select max(id) from outbox.audit")
    for action in ACTIONS.keys() - {"pause", "replay resume", "sinks remove", "sinks forget"}:
        ended = ask(filled, *ACTIONS[action], "--reason", "é" * 1001)
        assert (ended.code, ended.out) == (2, ""), action
        assert ended.err == "reason must have at most 2000 bytes\n", action
    assert query(filled, "select max(id) from outbox.audit") == recorded


def test_a_reason_is_shown_with_the_replay_and_a_blank_one_is_none(filled: Database) -> None:
    assert ask(filled, *ACTIONS["replay start"], "--reason", REASON).code == 0
    assert f"reason: {REASON}" in ask(filled, "replay", "show", "1").out
    assert ask(filled, *ACTIONS["replay cancel"], "--reason", "  ").code == 0
    assert newest(filled)["reason"] is None


def test_the_reason_of_a_pass_ends_with_it(filled: Database) -> None:
    assert ask(filled, "retention", "run", "--reason", REASON).code == 0
    query(filled, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 'relay r', 60)")
    assert query(filled, "select actor, reason from outbox.retention") == [("relay r", None)]


def test_what_a_terminal_would_interpret_is_not_printed(filled: Database) -> None:
    assert ask(filled, "pause", "crm", "--reason", "\x1b[2Jgone").code == 0
    assert "?[2Jgone" in ask(filled, "audit").out
    assert "\x1b" not in ask(filled, "audit").out + ask(filled, "status").out
