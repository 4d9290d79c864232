"""Sessions of a harness that end for a reason which no test declared are failures, however the harness ends."""

import threading
import time
from collections.abc import Collection

import pytest

from tests.support.database import Database
from tests.support.deliveries import emit
from tests.support.memory_sink import MemorySink, fails
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until


def whose_leases_ended(database: Database, expects: Collection[str] = ()) -> RelayHarness:
    """Return a harness whose session ended because nothing renewed its leases."""
    harness = RelayHarness(database.dsn, [(spec("s"), MemorySink())], lease_seconds=1.0, expects=expects)
    harness.start()
    harness.owns_all()
    harness.keeper.end()
    lease = harness.leases("s").ends_at
    until(lambda: time.monotonic() > lease, seconds=10, what="the leases have ended")
    emit(database, ["a"])
    until(lambda: harness.ended, seconds=10, what="the session ends")
    return harness


def test_a_harness_delivers_and_leaves_no_thread(database: Database) -> None:
    before = set(threading.enumerate())
    ids = emit(database, ["a", "b", "a"])
    sinks = MemorySink(fails(1)), MemorySink(keeps_order=False)
    with running(database.dsn, (spec("s"), sinks[0]), (spec("t"), sinks[1])) as harness:
        harness.owns_all()
        harness.settled()
        ids += emit(database, ["a", "b", "a"])
        harness.settled()
        assert harness.store.calls["settle"] > 0
    assert [sorted(event.id for event in sink.delivered) for sink in sinks] == [ids, ids]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_a_stopped_harness_releases_everything(database: Database) -> None:
    harness = RelayHarness(database.dsn, [(spec("s"), MemorySink())])
    harness.start()
    harness.owns_all()
    harness.stop()
    assert database.run("select count(*) from outbox.shard where owner is not null") == [(0,)]
    assert database.run("select count(*) from outbox.relay") == [(0,)]


def test_a_crash_judges_the_sessions_that_ended_before_it(database: Database) -> None:
    harness = whose_leases_ended(database)
    with pytest.raises(AssertionError, match=r"sessions ended that this test did not cause: .*lease_lost"):
        harness.crash()


def test_what_a_test_declares_or_judges_later_is_no_failure_of_a_crash(database: Database) -> None:
    whose_leases_ended(database, {"lease_lost"}).crash()
    harness = whose_leases_ended(database)
    harness.crash(unjudged=True)
    with pytest.raises(AssertionError, match="lease_lost"):
        harness.judge()
