"""Destinations that are down, or refuse everything, seen from outside: the receiver, the database, the log, doctor."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from outbox_relay.admin import status
from outbox_relay.admin.doctor import doctor
from outbox_relay.domain import circuit
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.ui.sink_views import judge_sink
from tests.support.database import Database, query
from tests.support.deliveries import emit, has
from tests.support.ports import free_port
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import say
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until
from tests.support.webhook_sink import a_sink

OPEN = "select 1 from outbox.sink where circuit <> 'closed'"
CLOSED = "select 1 from outbox.sink where circuit = 'closed' and last_error_mended_at > last_error_at"
ROWS = "select count(*) from outbox.delivery"
DEAD = f"{ROWS} where state = 'dead'"


@pytest.fixture(autouse=True)
def quickly_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a destination that answers nothing counts as down."""
    monkeypatch.setattr(circuit, "DOWN_SECONDS", 2.0)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/hooks"


def emit_of(database: Database, keys: int, count: int) -> list[int]:
    """Emit `count` events of `keys` keys, each in turn."""
    return emit(database, [f"k{n % keys}" for n in range(count)])


def has_all(receiver: Receiver, count: int) -> None:
    def fact() -> bool:
        return len(set(receiver.uids)) >= count

    until(fact, seconds=60, what=f"{count} events arrive")


def assert_in_order(database: Database, requests: Sequence[Request]) -> None:
    """Assert that the first requests of the events of each key came in the order of the log."""
    places = dict(query(database, "select uid::text, id from outbox.event"))
    of_key: defaultdict[str | None, list[int]] = defaultdict(list)
    for uid, key in dict.fromkeys((request.uid, request.header("outbox-key")) for request in requests):
        of_key[key].append(places[uid])
    assert all(numbers == sorted(numbers) for numbers in of_key.values())


@contextmanager
def until_probed(harness: RelayHarness, count: int = 3) -> Generator[None]:
    """Run the block, and wait until a few more attempts have ended."""

    def attempts() -> float:
        [family] = harness.loops[0].parts.measures.process.attempts.collect()
        return sum(sample.value for sample in family.samples)

    before = attempts()
    yield

    def fact() -> bool:
        return attempts() >= before + count

    until(fact, seconds=30, what=f"{count} probes are sent")


@pytest.mark.parametrize("keys", [1, 10, 60])
def test_a_receiver_that_is_down_opens_the_circuit_whatever_the_number_of_keys(database: Database, keys: int) -> None:
    port = free_port()
    with capture_logs() as lines, running(database.dsn, (spec("crm"), a_sink(url(port)))) as harness:
        harness.owns_all()
        emit_of(database, keys, 300)
        has(database, OPEN)
        with until_probed(harness):
            emit_of(database, keys, 300)
        assert query(database, ROWS) == [(0,)]
        [down] = [each for each in doctor(harness.store) if each.id == "destination-down"]
        assert "refused" in down.evidence.lower()
        [sink] = harness.store.named("status_sinks", {})
        assert judge_sink(sink._asdict(), {}, None, 0).word == "destination down"
        with Receiver(port=port) as receiver:
            has_all(receiver, 600)
            harness.settled()
            has(database, CLOSED)
            assert len(receiver.uids) == len(set(receiver.uids)) == 600
            assert_in_order(database, receiver.requests)
    assert [line["sink"] for line in lines if line["event"] == "circuit.opened"] == ["crm"]
    assert query(database, ROWS) == [(0,)]


def test_keys_with_rows_make_no_more_of_them_while_the_destination_is_down(database: Database) -> None:
    """A request that broke in the middle made a row. The later events of its key stay in the log."""
    port = free_port()
    retry = RetryPolicy(attempts=100, base_seconds=0.1, max_seconds=0.1)
    with running(database.dsn, (spec("crm", retry=retry), a_sink(url(port)))) as harness:
        with Receiver(say(500), port=port) as receiver:
            emit_of(database, 2, 2)
            has(database, f"{ROWS} having count(*) = 2")
        has(database, OPEN)
        with until_probed(harness):
            emit_of(database, 2, 500)
        assert query(database, ROWS) == [(2,)]
        with Receiver(port=port) as receiver:
            has_all(receiver, 502)
            harness.settled()
            assert_in_order(database, receiver.requests)


def test_a_receiver_that_dies_during_requests_leaves_a_row_for_each_of_them_alone(database: Database) -> None:
    """Their keys have a backlog, which must not become rows before the next attempt shows what happened."""

    async def break_off(_request: Request, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    port, retry = free_port(), RetryPolicy(attempts=100, base_seconds=0.1, max_seconds=0.1)
    crm = spec("crm", retry=retry, park_after_seconds=30.0)  # however long it takes to end the receiver
    with running(database.dsn, (crm, a_sink(url(port)))) as harness:
        harness.owns_all()
        with Receiver(break_off, port=port):
            emit_of(database, 3, 600)
            has(database, f"{ROWS} having count(*) >= 3")
        has(database, OPEN)
        with until_probed(harness):
            pass  # nothing is to happen but probes
        assert query(database, ROWS) == [(3,)]
        with Receiver(port=port) as receiver:
            has_all(receiver, 600)
            harness.settled()
            assert_in_order(database, receiver.requests)


@pytest.mark.parametrize("answer", [400, 401, 403, 404, 422, 500])
def test_a_receiver_that_refuses_everything_opens_the_circuit_and_no_event_dies(
    database: Database, answer: int
) -> None:
    with Receiver(say(answer)) as receiver, running(database.dsn, (spec("crm"), a_sink(receiver.url))) as harness:
        emit_of(database, 100, 1000)
        has(database, OPEN)
        with until_probed(harness, 10):
            pass  # nothing is to happen but probes
        assert query(database, DEAD) == [(0,)]
        counted = "select from outbox.delivery having max(attempts) = 1 and count(*) filter (where attempts > 0) = {}"
        has(database, counted.format(harness.loops[0].parts.spec.settings.circuit.open_after))
        assert f"answered {answer}" in status(harness.store)["sinks"]["crm"]["last_error"]
        refused = len(receiver.requests)
        receiver.answer = say(200)
        has_all(receiver, 1000)
        harness.settled()
        taken = receiver.requests[refused:]
        assert_in_order(database, taken)
        assert len({request.uid for request in taken}) >= 999  # a request may have been on its way
    assert query(database, ROWS) == [(0,)]
