"""A relay whose clock is an hour wrong: leases, due rows and hand-over go by the database's clock and a steady one."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.signatures import SECRET
from tests.support.relay_config import WEBHOOK_WITH_FILES
from tests.support.service import RelayService
from tests.support.shifted_clock import shifted
from tests.support.wait import until

pytestmark = pytest.mark.thorough

HOUR = 3600
EVENTS = 100
DUE_SECONDS = 3.0


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def shards(relay: RelayService) -> int:
    """Return the number of shards that a relay owns."""
    _, body = relay.ask("/readyz")
    return body["sinks"]["crm"]["shards"] if body else 0


def unsettled(database: Database) -> int:
    """Return the number of events that the stored positions and rows do not settle."""
    with database.connect() as connection:
        rows = connection.execute(
            "select b.events + (select count(*) from outbox.delivery) + (select count(*) from outbox.scheduled)"
            "  from outbox_internal.backlog('crm', array['order.made'], 10000, 5) b"
        ).fetchone()
    assert rows is not None
    return int(rows[0])


def emit(database: Database, keys: int, *, due_in: float | None = None) -> dict[str, float]:
    """Emit an event for each of that many keys; uid → when it is due, in unix seconds."""
    with database.connect() as connection:
        rows = connection.execute(
            "with due as materialized (select clock_timestamp() + make_interval(secs => %s) as at)"
            " select outbox.emit('order.made', '1', key => 'key-' || g, deliver_at => due.at)::text,"
            "        coalesce(extract(epoch from due.at), 0)::float8"
            "   from due, generate_series(1, %s) g",
            (due_in, keys),
        ).fetchall()
    return dict(rows)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shift", [HOUR, -HOUR], ids=["an hour ahead", "an hour behind"])
def test_a_wrong_clock_changes_nothing_but_the_timestamps_of_webhooks(
    database: Database, receiver: Receiver, tmp_path: Path, shift: int
) -> None:
    came: dict[str, float] = {}

    def answer(request: Request) -> Behaviour:
        came.setdefault(request.uid, time.time())
        return say(204)

    receiver.answer = chosen(answer)
    (tmp_path / "secrets").write_text(SECRET)
    (tmp_path / "tenant").write_text("one")
    text = WEBHOOK_WITH_FILES.format(database=f'dsn = "{database.dsn}"', url=receiver.url, directory=tmp_path).replace(
        "lease_seconds = 3", "lease_seconds = 15"
    )  # a third of it without an answer of the database ends a session, which a busy machine must not do here
    with RelayService(tmp_path, text, "right", CRM_TOKEN="x") as right:
        wrong = RelayService(tmp_path, text, "wrong", CRM_TOKEN="x", **shifted(shift))
        with wrong.start():
            until(lambda: (shards(right), shards(wrong)) == (32, 32), seconds=30, what="the shards are even")
            wanted = emit(database, EVENTS) | emit(database, EVENTS, due_in=DUE_SECONDS)
            until(lambda: wanted.keys() <= came.keys(), seconds=60, what="everything arrives")
            assert (shards(right), shards(wrong)) == (32, 32), "a lease was lost"
            assert not [uid for uid, due in wanted.items() if came[uid] < due]
            # A delivery that is not settled when its relay is killed comes again, whatever the clock says.
            until(lambda: unsettled(database) == 0, seconds=20, what="everything is settled")
            wrong.kill()
        until(lambda: shards(right) == 64, seconds=60, what="the other one takes over")
        again = emit(database, EVENTS)
        until(lambda: again.keys() <= came.keys(), seconds=30, what="everything arrives again")
        assert right.stop() == 0
    uids = [request.uid for request in list(receiver.requests)]
    assert len(uids) == len(set(uids)), "something arrived twice"
    stamps = {request.uid: int(request.header("webhook-timestamp") or 0) for request in receiver.requests}
    of_the_wrong = {uid for uid, stamp in stamps.items() if abs(stamp - came[uid]) > HOUR / 2}
    assert of_the_wrong, "the relay with the wrong clock delivered nothing"
    assert {request.uid for request in receiver.unverified} == of_the_wrong, "a receiver refuses what is an hour off"
