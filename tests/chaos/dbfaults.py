"""What goes wrong with the database: each fault is injected, held for a moment and undone."""

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

from tests.chaos.defaults import hostile_defaults, reset_statistics, short_timeouts
from tests.chaos.nemesis import Nemesis, Strike
from tests.support.postgres import PostgresServer
from tests.support.wait import until

if TYPE_CHECKING:
    from tests.chaos.database import DatabaseSide

HANG_SECONDS = (2.0, 13.0)
"""How long a commit hangs: a relay gives up after 10."""
BLACKHOLE_SECONDS = 8.0
CROWD_SECONDS = (2.0, 5.0)
FULL_SECONDS = (2.0, 5.0)
RECOVER_SECONDS = 60

Healed = tuple[float, str]
"""When the fault was undone, by time.monotonic(), and what to say about it."""
Injection = Callable[["DatabaseSide", random.Random], Healed]


class DatabaseNemesis:
    """Injects one fault of the database, while no other is."""

    def __init__(self, side: DatabaseSide, fault: str, inject: Injection) -> None:
        self.fault = fault
        self._side = side
        self._inject = inject

    def strike(self, rng: random.Random) -> Strike:
        """Inject it once; the servers work again when this returns, and the standby has everything."""
        with self._side.one_at_a_time:
            began = time.monotonic()
            healed, detail = self._inject(self._side, rng)
            self._side.count(self.fault)
            return Strike(self.fault, began, healed, detail)


def nemeses(side: DatabaseSide) -> list[Nemesis]:
    """One for each fault."""
    return [DatabaseNemesis(side, fault, inject) for fault, inject in FAULTS.items()]


def kill_backends(side: DatabaseSide, rng: random.Random) -> Healed:
    """pg_terminate_backend: one session of the relays, some, or all."""
    found = side.relay_backends()
    chosen = rng.sample(found, min(len(found), rng.choice([1, 1, 3, len(found)])))
    with side.connect() as connection:
        connection.execute("select pg_terminate_backend(pid) from unnest(%s::int[]) p (pid)", (chosen,))
    return time.monotonic(), f"{len(chosen)} of {len(found)} backends"


def crash(side: DatabaseSide, _rng: random.Random) -> Healed:
    """Immediate stop and start: crash recovery, on the same port and data."""
    side.pair.primary.restart("immediate")
    healed = time.monotonic()
    side.pair.wait_for_standby("sync")
    return healed, ""


def promote(side: DatabaseSide, _rng: random.Random) -> Healed:
    """SIGKILL for the primary, promotion of the standby, and a new standby where the primary was."""
    side.pair.fail_over()
    healed = time.monotonic()
    side.pair.replace()
    return healed, f"a new standby after {time.monotonic() - healed:.1f} s more"


def hang_commits(side: DatabaseSide, rng: random.Random) -> Healed:
    """The synchronous standby is gone for a while: every COMMIT waits for it."""
    standby = side.pair.standby
    assert standby is not None, "there is no standby"
    seconds = rng.uniform(*HANG_SECONDS)
    standby.stop()
    _hold(seconds)
    standby.start()
    side.pair.wait_for_standby("sync")
    return time.monotonic(), f"{seconds:.1f} s"


def blackhole(side: DatabaseSide, _rng: random.Random) -> Healed:
    """Every connection of the relays is lost without a word; new ones pass."""
    lost = sum(proxy.blackhole() for proxy in side.proxies)
    _hold(BLACKHOLE_SECONDS)
    for proxy in side.proxies:
        proxy.bury()
    return time.monotonic(), f"{lost} connections"


def crowd(side: DatabaseSide, rng: random.Random) -> Healed:
    """All slots are taken, and some relays need a new one."""
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
    """Connect until refused; how often that was possible."""
    from tests.chaos.database import CROWD, NAME

    for taken in range(1000):
        try:
            connection = psycopg.connect(side.pair.primary.dsn(NAME, CROWD, connect_timeout="5"))
        except psycopg.OperationalError:
            return taken
        held.callback(_quietly(connection))
    raise AssertionError("a server with 100 slots gave 1000")


def fill_disk(side: DatabaseSide, rng: random.Random) -> Healed:
    """No room for anything that grows: a file system that is full, or a server that says so where none can be made."""
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
    # A server that cannot write its WAL ends itself, and cannot recover either before there is room.
    until(lambda: _answers(server) or not server.process.alive, seconds=RECOVER_SECONDS, what="the server decides")
    ended = not server.process.alive
    if ended:
        server.restart("immediate")
    healed = time.monotonic()
    side.pair.wait_for_standby("sync")
    return healed, f"{seconds:.1f} s at {used >> 20} MiB" + (", the server ended" if ended else "")


@contextmanager
def _said_to_be_full(side: DatabaseSide) -> Generator[None]:
    """Fake: inserts into the log and the ledger are refused as a full disk refuses them."""
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
    """Let the fault last."""
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
    "short timeouts": short_timeouts,
    "statistics reset": reset_statistics,
}
