"""Sessions of a harness that end for a reason which no test declared are failures, however the harness ends."""

import time
from collections.abc import Collection

import pytest

from tests.support.database import Database
from tests.support.deliveries import emit
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, spec
from tests.support.wait import auntil


async def whose_leases_ended(database: Database, expects: Collection[str] = ()) -> RelayHarness:
    """Return a harness whose session ended because nothing renewed its leases."""
    harness = RelayHarness(database.dsn, [(spec("s"), MemorySink())], lease_seconds=1.0, expects=expects)
    await harness.start()
    await harness.owns_all()
    harness.tasks[0].cancel()
    lease = max(lease.until for lease in harness.leases("s").held.values())

    async def past() -> bool:
        return time.monotonic() > lease

    async def noticed() -> bool:
        return bool(harness.ended)

    await auntil(past, seconds=10, what="the leases have ended")
    emit(database, ["a"])
    await auntil(noticed, seconds=10, what="the session ends")
    return harness


async def test_a_crash_judges_the_sessions_that_ended_before_it(database: Database) -> None:
    harness = await whose_leases_ended(database)
    with pytest.raises(AssertionError, match=r"sessions ended that this test did not cause: .*lease_lost"):
        await harness.crash()


async def test_what_a_test_declares_or_judges_later_is_no_failure_of_a_crash(database: Database) -> None:
    await (await whose_leases_ended(database, {"lease_lost"})).crash()
    harness = await whose_leases_ended(database)
    await harness.crash(unjudged=True)
    with pytest.raises(AssertionError, match="lease_lost"):
        harness.judge()
