"""Ticks that come with a window: when they do, who shares it, and what else a look must not disturb."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outbox_relay.domain.errors import StatementFailed
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, ids
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until

READS = ("read_small", "read_rest", "read_late")


def reads(harness: RelayHarness) -> int:
    """Return the number of reads that took a round trip of their own."""
    return sum(harness.store.calls[name] for name in READS)


@pytest.mark.fence("a look with a window takes long or fails")
def test_what_one_look_may_not_read_ends_no_ticks(database: Database) -> None:
    """Goes red when a look with the same window follows one that failed: the window is never read in the usual way."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        store: Any = harness.store
        look = store.look

        def fail(request: Any) -> Any:
            if request is not None:
                raise StatementFailed("canceling statement due to statement timeout", "57014")
            return look(request)

        store.look = fail
        wanted = emit(database, ["a", "b"])
        delivered(sink, wanted)
        harness.settled()
        assert harness.ended == []
    assert ids(sink) == wanted


@pytest.mark.fence("a relay goes on at another server than the one that it read from")
@pytest.mark.parametrize("doubt", ["incarnation", "numbers", "connection"])
def test_what_was_read_is_doubted_when_the_server_is_not_the_same(database: Database, doubt: str) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink), expects={"incarnation"}) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["a"]))
        store: Any = harness.store
        look, told = store.look, list[str]()

        def odd(request: Any) -> Any:
            result, window, seconds = look(request)
            if not told:
                told.append(doubt)
                if doubt == "connection":
                    store.connection_losses += 1
                elif doubt == "incarnation":
                    result = replace(result, incarnation="another")
                else:
                    result = replace(result, tick=result.tick._replace(seq=result.tick.seq - 1))
            return result, window, seconds

        store.look = odd
        until(lambda: len(harness.ended) > 0, seconds=20, what="the session ends")
        assert told
        delivered(sink, emit(database, ["b"]))
        harness.settled()
