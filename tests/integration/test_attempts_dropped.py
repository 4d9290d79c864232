"""Attempts that the database cannot record: their records are dropped, and the settlements go on without them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest

from outbox_relay.domain.outcomes import Failed
from outbox_relay.relay import settle
from tests.support import volume
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit
from tests.support.logs import RecordedLog
from tests.support.memory_sink import BOTH, MemorySink, fails
from tests.support.relay_harness import running, spec

PARTITIONS = "select i.inhrelid::regclass::text from pg_inherits i where i.inhparent = 'outbox.attempt'::regclass"
RAISING = """
create function public.refuse() returns trigger language plpgsql as $$ begin raise 'no room'; end $$;
create trigger refuse before insert on outbox.attempt for each row execute function public.refuse()"""

Fault = Callable[[Database], AbstractContextManager[None]]


def run(database: Database, *statements: str) -> None:
    """Execute statements as superuser."""
    with database.connect(autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextmanager
def trigger(database: Database) -> Generator[None]:
    """Let a trigger refuse every attempt."""
    run(database, RAISING)
    yield
    run(database, "drop trigger refuse on outbox.attempt")


@contextmanager
def constraint(database: Database) -> Generator[None]:
    """Let a constraint refuse every attempt."""
    run(database, "alter table outbox.attempt add constraint refuse check (number < 0) not valid")
    yield
    run(database, "alter table outbox.attempt drop constraint refuse")


@contextmanager
def no_partition(database: Database) -> Generator[None]:
    """Take all partitions away, also the DEFAULT one."""
    parts = [name for (name,) in query(database, PARTITIONS)]
    run(database, *(f"alter table outbox.attempt detach partition {name}" for name in parts))
    yield
    run(database, "alter table outbox.attempt attach partition outbox.attempt_default default")


@contextmanager
def no_table(database: Database) -> Generator[None]:
    """Give the table another name."""
    run(database, "alter table outbox.attempt rename to attempt_away")
    yield
    run(database, "alter table outbox.attempt_away rename to attempt")


@contextmanager
def full_tablespace(database: Database) -> Generator[None]:
    """Move every partition to a tablespace without free space."""
    if not volume.available():
        pytest.skip("this process cannot mount a file system")
    owner, path = database.server.data.stat(), Path(mkdtemp(prefix="outbox-attempts-"))
    os.chown(path, owner.st_uid, owner.st_gid)
    small, filler = volume.Volume(path, 4), path / "filler"
    tablespace = f"attempts_{database.name}"
    parts = [name for (name,) in query(database, PARTITIONS)]
    try:
        run(database, f"create tablespace {tablespace} location '{path}'")
        run(database, *(f"alter table {name} set tablespace {tablespace}" for name in parts))
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"-" * 4096):
                pass
        yield
        filler.unlink()
    finally:
        run(database, *(f"alter table {name} set tablespace pg_default" for name in parts))
        run(database, f"drop tablespace {tablespace}")
        small.remove()


FAULTS = [trigger, constraint, no_partition, no_table, full_tablespace]


@pytest.mark.fence("the database refuses the records of attempts")
@BOTH
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_attempts_that_cannot_be_recorded_hold_up_no_delivery(
    database: Database, monkeypatch: pytest.MonkeyPatch, keeps_order: bool, fault: Fault
) -> None:
    """Goes red when a settlement is not written again without its records: the session would end each time."""
    monkeypatch.setattr(settle, "SUSPEND_SECONDS", 0.05)
    events = emit(database, ["a", "b", "a"])
    sink = MemorySink(fails(2, events[:1], Failed("not now", 500)), keeps_order=keeps_order)
    with fault(database), running(database.dsn, (spec("s", record_attempts="all"), sink)) as harness:
        [relay] = harness.loops
        relay.recorder._log = log = RecordedLog()  # pyright: ignore[reportPrivateUsage]
        delivered(sink, events)
        harness.settled()
        assert relay.recorder.dropped == 5
        assert query(database, "select count(*) from outbox.delivery") == [(0,)]
        [(event, values)] = log.warnings
        assert (event, values["dropped"] > 0) == ("attempts.dropped", True)
