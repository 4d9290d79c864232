"""Faults of the database: each is injected, kept for a while and undone."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg.rows import TupleRow

from tests.chaos import statements
from tests.chaos.defaults import hostile_defaults, reset_statistics
from tests.chaos.nemesis import Nemesis, Strike
from tests.support.postgres import PostgresServer
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.chaos.database import DatabaseSide

HANG_SECONDS = (2.0, 13.0)
"""Range of the duration of a hanging commit; a relay gives up after 10 s."""
BLACKHOLE_SECONDS = 8.0
CROWD_SECONDS = (2.0, 5.0)
FULL_SECONDS = (2.0, 5.0)
RECOVER_SECONDS = 60

Healed = tuple[float, str]
"""Time at which the fault was undone, by time.monotonic(), and details for the report."""
Injection = Callable[["DatabaseSide", random.Random], Healed]


class DatabaseNemesis:
    """Injects one fault of the database, never together with another."""

    def __init__(self, side: DatabaseSide, fault: str, inject: Injection) -> None:
        self.fault = fault
        self._side = side
        self._inject = inject

    def strike(self, rng: random.Random) -> Strike:
        """Inject the fault once. Return when the servers work again and the standby has all commits."""
        with self._side.one_at_a_time:
            began = time.monotonic()
            healed, detail = self._inject(self._side, rng)
            return Strike(self.fault, began, healed, detail)


def nemeses(side: DatabaseSide) -> list[Nemesis]:
    """Return a nemesis for each fault."""
    return [DatabaseNemesis(side, fault, inject) for fault, inject in FAULTS.items()]


def kill_backends(side: DatabaseSide, rng: random.Random) -> Healed:
    """Terminate one, some or all sessions of the relays."""
    found = side.relay_backends()
    chosen = rng.sample(found, min(len(found), rng.choice([1, 1, 3, len(found)])))
    with side.connect() as connection:
        connection.execute("select pg_terminate_backend(pid) from unnest(%s::int[]) p (pid)", (chosen,))
    return time.monotonic(), f"{len(chosen)} of {len(found)} backends"


def crash(side: DatabaseSide, _rng: random.Random) -> Healed:
    """Stop the primary like a crash and start it on the same port and data."""
    side.pair.primary.restart("immediate")
    healed = time.monotonic()
    side.pair.wait_for_standby("sync")
    return healed, ""


def promote(side: DatabaseSide, _rng: random.Random) -> Healed:
    """Kill the primary, promote the standby, and put a new standby in the place of the primary."""
    side.pair.fail_over()
    healed = time.monotonic()
    side.pair.replace()
    return healed, f"a new standby after {time.monotonic() - healed:.1f} s more"


def hang_commits(side: DatabaseSide, rng: random.Random) -> Healed:
    """Stop the synchronous standby for a while, so that every COMMIT waits for it."""
    standby = side.pair.standby
    assert standby is not None, "there is no standby"
    seconds = rng.uniform(*HANG_SECONDS)
    standby.stop()
    _hold(seconds)
    standby.start()
    side.pair.wait_for_standby("sync")
    return time.monotonic(), f"{seconds:.1f} s"


def blackhole(side: DatabaseSide, _rng: random.Random) -> Healed:
    """Lose all connections of the relays without FIN or RST; new ones work."""
    lost = sum(proxy.blackhole() for proxy in side.proxies)
    _hold(BLACKHOLE_SECONDS)
    for proxy in side.proxies:
        proxy.bury()
    return time.monotonic(), f"{lost} connections"


def crowd(side: DatabaseSide, rng: random.Random) -> Healed:
    """Take all connection slots, and terminate sessions of the relays so that they need new ones."""
    with ExitStack() as held:
        taken = _take_all_slots(side, held)
        with side.connect() as connection:
            found = side.relay_backends()
            chosen = rng.sample(found, min(len(found), 6))
            connection.execute("select pg_terminate_backend(pid) from unnest(%s::int[]) p (pid)", (chosen,))
        end = time.monotonic() + rng.uniform(*CROWD_SECONDS)
        while time.monotonic() < end:
            taken += _take_all_slots(side, held)
            _hold(0.05)
    return time.monotonic(), f"{taken} slots"


def _take_all_slots(side: DatabaseSide, held: ExitStack) -> int:
    """Connect until refused, and return the number of connections."""
    from tests.chaos.database import CROWD, NAME

    for taken in range(1000):
        try:
            connection = psycopg.connect(side.pair.primary.dsn(NAME, CROWD, connect_timeout="5"))
        except psycopg.OperationalError:
            return taken
        held.callback(_quietly(connection))
    raise AssertionError("a server gave 1000 slots")


def fill_disk(side: DatabaseSide, rng: random.Random) -> Healed:
    """Fill the file system, or refuse inserts with the same error if no file system can be mounted."""
    seconds = rng.uniform(*FULL_SECONDS)
    if side.can_fill:
        return _really_full(side, seconds)
    with _said_to_be_full(side):
        _hold(seconds)
    return time.monotonic(), f"{seconds:.1f} s, raised by a trigger"


def _really_full(side: DatabaseSide, seconds: float) -> Healed:
    volume, server = side.pair.volume(), side.pair.primary
    used = volume.fill()
    try:
        _hold(seconds)
    finally:
        volume.free()
    # A server that cannot write its WAL exits, and cannot recover until there is room.
    until(lambda: _answers(server) or not server.process.alive, seconds=RECOVER_SECONDS, what="the server decides")
    ended = not server.process.alive
    if ended:
        server.restart("immediate")
    healed = time.monotonic()
    side.pair.wait_for_standby("sync")
    return healed, f"{seconds:.1f} s at {used >> 20} MiB" + (", the server ended" if ended else "")


@contextmanager
def _said_to_be_full(side: DatabaseSide) -> Generator[None]:
    """Refuse inserts into the log and the positions by triggers, with the error of a full disk."""
    with side.connect() as connection:
        connection.execute(FULL)
    try:
        yield
    finally:
        with side.connect() as connection:
            connection.execute("drop function public.no_room() cascade")


FULL = """
create function public.no_room() returns trigger language plpgsql as $$
begin
    raise exception 'could not extend file: No space left on device' using errcode = '53100';
end
$$;
create trigger no_room before insert on outbox.event for each statement execute function public.no_room();
create trigger no_room before insert on outbox.progress for each statement execute function public.no_room();
"""


def _answers(server: PostgresServer) -> bool:
    try:
        server.connect().close()
    except psycopg.OperationalError:
        return False
    return True


def _quietly(connection: psycopg.Connection[TupleRow]) -> Callable[[], None]:
    def close() -> None:
        with contextlib.suppress(psycopg.Error):
            connection.close()

    return close


def _hold(seconds: float) -> None:
    """Wait while the fault lasts."""
    threading.Event().wait(seconds)


FAULTS: dict[str, Injection] = {
    "backend killed": kill_backends,
    "postgres crash": crash,
    "promotion": promote,
    "hanging commit": hang_commits,
    "blackholed connection": blackhole,
    "too many connections": crowd,
    "disk full": fill_disk,
    "hostile role defaults": hostile_defaults,
    "statements cancelled": statements.cancel,
    "table locked": statements.lock,
    "statistics reset": reset_statistics,
}
