"""Handlers inside a transaction, without a relay: what is committed, what counts, and what is not the event's fault."""

from __future__ import annotations

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable
from outbox_relay.sinks.contract.handing import an_event
from tests.support.database import Database, query
from tests.support.python_sink import SECONDS, python_sink
from tests.support.wait import until

KINDS = ("transactional", "atransactional")


@pytest.fixture
def effects(database: Database) -> Database:
    """Return a database with a table in which handlers write their effects."""
    do(database, "create table effects (uid uuid)")
    return database


def do(database: Database, statement: str) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode())


def written(database: Database) -> list[str]:
    return [uid for (uid,) in query(database, "select uid::text from effects order by uid")]


def marks(database: Database) -> int:
    return query(database, "select count(*) from outbox.inbox")[0][0]


FAULTS = {
    "commit": "ProgrammingError at ",
    "hidden failure": "a statement of the handler failed",
    "rollback": "the handler rolled its transaction back",
    "close": "delivery.connection was closed or lost",
    "pipeline": "the handler returned inside a pipeline",
    "open block": "OutOfOrderTransactionNesting at ",
    "a coroutine": "the handler returned an awaitable",
    "lose the connection": "delivery.connection was closed or lost",
    "named as ours": "DatabaseDown at support/odd_handlers.py:",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_does_not_let_its_transaction_be_committed_fails_without_an_effect(
    effects: Database, kind: str
) -> None:
    with python_sink(kind, dsn=effects.dsn) as running:
        assert running.deliver("first") == DELIVERED
        verdicts = {what: running.deliver(what) for what in FAULTS}
        assert running.deliver("last") == DELIVERED
    reasons = {what: verdict.reason for what, verdict in verdicts.items() if isinstance(verdict, Failed)}
    assert {what: reason[: len(FAULTS[what])] for what, reason in reasons.items()} == FAULTS
    assert (len(written(effects)), marks(effects)) == (2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_commits_by_a_statement_is_told_so(effects: Database, kind: str) -> None:
    with python_sink(kind, dsn=effects.dsn) as running:
        verdict = running.deliver("commit statement")
        assert isinstance(verdict, Failed)
        assert verdict.reason == "the handler ended the transaction of delivery.connection: the relay commits it"


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_whose_connection_is_lost_has_its_effect_once(effects: Database, kind: str) -> None:
    with python_sink(kind, dsn=effects.dsn) as running:
        event = an_event(None, b"lose it once")
        assert isinstance(running.deliver(event), Failed)
        assert [running.deliver(event) for _ in range(2)] == [DELIVERED] * 2
    assert written(effects) == [event.uid]


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_that_ends_before_the_handler_is_called_counts_no_attempt(effects: Database, kind: str) -> None:
    """Another transaction marks the event, so that the mark waits."""
    with python_sink(kind, dsn=effects.dsn, timeout_seconds=1.0) as running:
        assert running.deliver("first") == DELIVERED
        event = an_event(None, b"waits")
        with effects.connect() as other, other.transaction():
            other.execute("select outbox.once('test', %s)", (event.uid,))
            verdict = running.deliver(event)
        assert isinstance(verdict, Unavailable)
        assert verdict.reason == "dsn: the handler's database did not answer in time"
        assert verdict.attempt is not None
        assert verdict.attempt.code == "database"
        until(lambda: not (running.sink.completed(0.1) or running.sink.hanging), seconds=SECONDS, what="it has ended")
        assert len(written(effects)) == 1, "the handler is not called any more"


# -- the connections ----------------------------------------------------------------------------------------------
