"""A person asks that the destination of a sink is probed now: who does it, when, and what is recorded."""

from __future__ import annotations

from functools import partial

import pytest

from outbox_relay.admin import sinks
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.domain.outcomes import Unavailable
from tests.support import books as owned
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.ledger import Ledger
from tests.support.memory_sink import BOTH, Late, MemorySink, fails
from tests.support.relay_harness import running, spec
from tests.support.sink_actions import register
from tests.support.wait import until

books = owned.books

PATIENT = CircuitPolicy(open_after=1, probe_seconds=600.0, probe_max_seconds=600.0)
"""A circuit that no test waits for."""
OPEN = "update outbox.sink set circuit = 'open', circuit_since = now(), last_error = 'refused', last_error_at = now()"
AUDIT = "select action, sink, count, actor, reason from outbox.audit order by id"


@BOTH
def test_an_open_circuit_probes_when_a_person_asks(database: Database, *, keeps_order: bool) -> None:
    late = Late()
    late.script = fails(999, None, Unavailable("connection refused"))
    sink = MemorySink(late, keeps_order=keeps_order)
    with running(database.dsn, (spec("s", circuit=PATIENT), sink)) as harness:
        wanted = emit(database, ["a"])
        has(database, "select 1 from outbox.sink where circuit = 'open'")
        tried = len(sink.attempts)
        assert sinks.probe(harness.store, "s", actor="anna", reason="is it back?") is None

        def probed() -> bool:
            return len(sink.attempts) > tried

        until(probed, seconds=10, what="the destination is probed")
        has(database, "select 1 from outbox.sink where circuit = 'open'")
        late.script = None
        assert sinks.probe(harness.store, "s", actor="anna", reason="it is back") is None
        delivered(sink, wanted)
        has(database, "select 1 from outbox.sink where circuit = 'closed'")
    asked = [("sinks probe", "s", 1, "anna", "is it back?"), ("sinks probe", "s", 1, "anna", "it is back")]
    assert query(database, AUDIT) == asked


def test_a_request_is_counted_and_a_wrong_one_is_refused(books: Ledger) -> None:
    books.do(OPEN)
    assert sinks.probe_obstacle(books.store, "s") is None
    assert sinks.probe(books.store, "s", actor="anna") is None
    assert [row.probes for row in books.store.sinks(["s"])] == [1]
    for probe in (partial(sinks.probe, actor="anna"), sinks.probe_obstacle):
        with pytest.raises(NotFound, match="there is no sink 't' in this database; there are: s"):
            probe(books.store, "t")
    with pytest.raises(ConfigurationError, match="reason must have at most 2000 bytes"):
        sinks.probe(books.store, "s", actor="anna", reason="é" * 1001)
    assert books.query("select probes from outbox.sink") == [(1,)]


def test_the_command_says_what_it_did(database: Database) -> None:
    register(database, "s")
    probe = ("sinks", "probe", "s", "--dsn", database.dsn)
    ended = inside(*probe)
    assert (ended.code, ended.out) == (0, "the circuit of sink s is closed: there is nothing to probe\n")
    query(database, f"{OPEN} returning 1")
    ended = inside(*probe, "--reason", "mended", "--json")
    assert (ended.code, ended.json) == (0, {"done": 1, "left": 0})
    assert query(database, "select action, sink, reason from outbox.audit") == [("sinks probe", "s", "mended")]
    assert inside("sinks", "probe", "t", "--dsn", database.dsn).code == 3
