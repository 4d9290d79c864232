"""The chores of a relay, done in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import structlog

from outbox_relay.postgres.store import Store
from outbox_relay.relay.chores import Chore, Chores, housekeeping


@contextmanager
def doing(store: Store, chores: Sequence[Chore] = ()) -> Generator[None]:
    """Do `chores` during the block, or all that keep the tables small."""
    stopping = threading.Event()
    work = Chores(store, structlog.get_logger("test"), chores or housekeeping(store))
    thread = threading.Thread(target=work.run, args=(stopping,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(10)
    assert not thread.is_alive()
