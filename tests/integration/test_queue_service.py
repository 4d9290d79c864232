"""Relay processes that share a sink with ``claim = "rows"``, one of which is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.receiver import Receiver
from tests.support.receiver.answers import after, say
from tests.support.receiver.received import received_types
from tests.support.relay_config import webhook_with_files_config
from tests.support.service import RelayService
from tests.support.wait import until

JOBS = 40
LEASED = "select count(*) from outbox.delivery where lease_until > now()"


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def relay_of(database: Database, receiver: Receiver, directory: Path, name: str) -> RelayService:
    """Return a relay that posts every event to the receiver, eight at a time, by turns of tenants."""
    text = webhook_with_files_config(f'dsn = "{database.dsn}"', receiver.url, directory)
    queued = 'type = "webhook"\nclaim = "rows"\nfair_by = "tenant"\nmax_in_flight = 8\n'
    return RelayService(directory, text.replace('type = "webhook"\n', queued, 1), name, CRM_TOKEN="t")


def test_jobs_of_a_relay_that_is_killed_are_done_by_another_after_their_leases(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answer = after(60.0, say(204))
    emit = "select outbox.emit('job.' || g, '1', tenant => 't' || g %% 4) from generate_series(1, %s) g"
    with relay_of(database, receiver, tmp_path, "one") as one:
        query(database, emit, JOBS)
        until(lambda: len(receiver.requests) == 8, seconds=30, what="eight jobs are under way")
        until(lambda: query(database, LEASED) == [(8,)], seconds=30, what="the others that were claimed are back")
        assert outbox_relay("check", "-c", one.config).code == 0
        one.kill()
    receiver.answer = say(204)
    with relay_of(database, receiver, tmp_path, "two") as two, relay_of(database, receiver, tmp_path, "three"):
        until(lambda: len(receiver.requests) == JOBS, seconds=60, what="the other jobs are done")
        assert query(database, LEASED) == [(8,)]
        query(database, "update outbox.delivery set lease_until = now() returning 1")
        until(lambda: query(database, "select from outbox.delivery") == [], seconds=30, what="all are done")
        status = outbox_relay("status", "-c", two.config, "--json")
        assert (status.code, '"backlog": 0' in status.out) == (0, True)
    assert set(received_types(receiver)) == {f"job.{n}" for n in range(1, JOBS + 1)}
    assert Counter(Counter(received_types(receiver)).values()) == {1: JOBS - 8, 2: 8}
