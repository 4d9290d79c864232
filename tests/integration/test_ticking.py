"""Wake-up, incarnations, rebase: what a relay notices of the server, and what it does then."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox_relay.domain.errors import IncarnationChanged
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.listener import LOCK
from outbox_relay.postgres.store import Store
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, running, spec

ASLEEP = "select 1 from pg_locks where locktype = 'advisory' and classid = %s and objid = %s and mode = 'ExclusiveLock'"


def asleep(database: Database) -> None:
    """Wait until a relay sleeps."""
    has(database, ASLEEP, *LOCK)


class Notified:
    """A connection that hears the notifications of emits."""

    def __init__(self, database: Database) -> None:
        self._connection = database.connect(autocommit=True)
        self._connection.execute("listen outbox")

    def count(self) -> int:
        """Return the number that came since the last call."""
        self._connection.execute("select 1")
        return len(list(self._connection.notifies(timeout=0.2)))

    def close(self) -> None:
        """Hear no more."""
        self._connection.close()


def test_an_emit_wakes_a_sleeping_relay_and_notifies_nobody_while_it_is_awake(database: Database) -> None:
    heard = Notified(database)
    emit(database, ["nobody is there"])
    assert heard.count() == 0
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        asleep(database)
        wanted = emit(database, ["a"])
        assert heard.count() == 1
        delivered(sink, wanted)
    heard.close()


SPEAK_OF_TICKS: dict[str, Callable[[Store, str], object]] = {
    "read_rest": lambda store, server: store.read_rest([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "read_small": lambda store, server: store.read_small([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "read_late": lambda store, server: store.read_late([0], None, BEGINNING, BEGINNING, 0, 9, 9, 9, server=server),
    "settle": lambda store, server: store.settle("s", uuid4(), {0: (9, Position(BEGINNING))}, [], {}, server=server),
    "positions": lambda store, server: store.positions("s", [0], server=server),
    "blocked_keys": lambda store, server: store.blocked_keys("s", [0], hold=False, server=server),
    "still_blocked": lambda store, server: store.still_blocked("s", ["a"], hold=False, server=server),
    "highest_discarded": lambda store, server: store.highest_discarded("s", server=server),
    "discarded": lambda store, server: store.discarded("s", [(1, UUID(int=1))], server=server),
    "register_sinks": lambda store, server: store.register_sinks([("t", ["*"], None)], BEGINNING, server=server),
}


@pytest.mark.fence("a pooler hides the change of the server")
def test_what_speaks_of_ticks_is_refused_by_every_server_but_theirs(database: Database) -> None:
    store = CountingStore(database.dsn)
    store.open()
    look = store.tick()
    store.register_sinks([("s", ["*"], None)], look.tick, server=look.incarnation)
    written = "select (select count(*) from outbox.progress), (select count(*) from outbox.sink)"
    for name, statement in SPEAK_OF_TICKS.items():
        statement(store, look.incarnation)
        before, losses = query(database, written), store.connection_losses
        with pytest.raises(IncarnationChanged):
            statement(store, look.incarnation + "0")
        assert query(database, written) == before, name
        assert store.connection_losses > losses, f"{name}: whoever holds a tick of the other server is told"
    store.close()


def test_a_tick_inside_a_transaction_with_an_xid_is_refused(database: Database) -> None:
    with database.connect() as connection:
        connection.execute("select pg_current_xact_id()")
        with pytest.raises(psycopg.errors.RaiseException, match="transaction of its own"):
            connection.execute("select * from outbox_internal.tick()")
