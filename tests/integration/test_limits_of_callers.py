"""Limits that a caller sets: odd ones neither fail nor make a call long."""

from __future__ import annotations

from collections.abc import Generator
from itertools import product

import pytest

from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.sink_actions import call

MOST = [None, -(2**31), -1, 0, 2**31 - 1]
SECONDS = [None, "-infinity", -1.0, "infinity", "nan"]
COPIES = """insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)
            select d.sink, d.id + n, d.shard, d.state, d.ordered, d.due_at, d.uid, d.type, d.content_type, d.created_at
              from outbox.delivery d cross join generate_series(1, {rows}) n"""


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with the sink `s` and one dead row of it."""
    with ledger(database) as found:
        found.register(("s", ["*"], "beginning"))
        found.own("s")
        found.park("s", *(found.row(event, "dead") for event in found.emit("k")))
        yield found


@pytest.mark.parametrize(
    "statement",
    [
        "outbox_internal.backlog('s', null, %s::integer, %s::double precision)",
        "outbox.preview_removal('s', %s::integer, %s::double precision, 1)",
        "outbox.preview_seek('s', 'beginning', %s::integer, %s::double precision)",
    ],
)
def test_a_count_takes_any_limits(books: Ledger, statement: str) -> None:
    for most, seconds in product(MOST, SECONDS):
        assert len(call(books.database, f"select * from {statement}", most, seconds)) == 1


@pytest.mark.parametrize("most", MOST)
def test_a_retry_takes_any_limit_of_due_rows(books: Ledger, most: int | None) -> None:
    [step] = call(books.database, "select done from outbox.retry_deliveries('{}', most_due => %s::integer)", most)
    assert step["done"] == 1


@pytest.mark.parametrize("most", [None, 2**31 - 1])
def test_a_removal_without_a_limit_goes_by_steps(books: Ledger, most: int | None) -> None:
    call(books.database, COPIES.format(rows=1000))
    statement = "select removed, deliveries from outbox.drop_sink('s', false, %s::integer, 'x', null)"
    assert call(books.database, statement, most) == [{"removed": False, "deliveries": 1000}]
    assert call(books.database, statement, most) == [{"removed": True, "deliveries": 1}]


def test_the_pause_of_a_removal_names_its_actor(books: Ledger) -> None:
    call(books.database, COPIES.format(rows=1000))
    call(books.database, "select outbox.drop_sink('s', false, 10, 'anna', null)")
    call(books.database, "update outbox.sink set paused = false")
    found = call(
        books.database, "select action, actor from outbox.audit where action in ('pause', 'resume') order by id"
    )
    assert [tuple(row.values()) for row in found] == [("pause", "anna"), ("resume", None)]
