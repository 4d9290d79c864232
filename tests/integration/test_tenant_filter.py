"""Deliveries of a tenant: commands and page select them, and each row costs one look into an index of the log."""

from __future__ import annotations

import json

from tests.support import books as owned
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.deliveries import delivered, has
from tests.support.ledger import Ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replays import Clients, counts, ended, preview, start

books = owned.books


def dead_of(books: Ledger, *tenants: str | None) -> list[str]:
    """Make a dead letter of each tenant, and return their uids."""
    events = books.emit(*(f"k{n}" for n in range(len(tenants))))
    for event, tenant in zip(events, tenants, strict=True):
        books.do("update outbox.event set tenant = %s where id = %s", tenant, event)
    books.park("s", *(books.row(event, "dead", error="gone") for event in events))
    books.catch_up("s")
    return [books.uid(event) for event in events]


def dead(books: Ledger, *arguments: str) -> Ended:
    """Run a command on dead letters."""
    return inside("dead", *arguments, "--dsn", books.database.dsn)


def test_the_commands_select_the_deliveries_of_a_tenant(books: Ledger) -> None:
    first, other, none, second = dead_of(books, "acme", "acme2", None, "acme")
    listed = (dead(books, "list", "--tenant", "acme", "--json")).json
    assert ([each["uid"] for each in listed["deliveries"]], listed["total"]) == ([second, first], 2)
    assert (dead(books, "list", "--tenant", "ACME", "--json")).json["total"] == 0
    assert (dead(books, "list", "--tenant", "acme", "--sink", "s", "--json")).json["total"] == 2
    [group] = (dead(books, "summary", "--tenant", "acme", "--json")).json["groups"]
    assert group["count"] == 2
    assert (dead(books, "retry", "--tenant", "acme2", "--dry-run", "--json")).json == {
        "matched": 1,
        "exact": True,
    }
    assert (dead(books, "retry", "--tenant", "acme2", "--yes", "--json")).json == {"done": 1, "left": 0}
    ended = dead(books, "discard", "--tenant", "acme", "--reason", "gone", "--yes", "--json")
    assert ended.json == {"done": 2, "left": 0}, ended.err
    assert books.query("select uid::text, state from outbox.delivery order by id") == [
        (other, "waiting"),
        (none, "dead"),
    ]
    [filters] = books.query("select array_agg(filter ->> 'tenant' order by id) from outbox.audit")
    assert filters == (["acme2", "acme"],)


def test_a_replay_delivers_the_events_of_a_tenant_alone(database: Database) -> None:
    """Goes red where one of the reads, the counts, `why` or an erasure leaves the tenant out."""
    sink, clients = MemorySink(), Clients()
    tenants = ["acme", "acme2", None, "acme"]
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        with database.connect() as connection:
            for tenant in tenants:
                connection.execute("select outbox.emit('t', '1', key => 'k', tenant => %s)", (tenant,))
        events = query(database, "select id, uid::text from outbox.event order by id")
        delivered(sink, [event_id for event_id, _ in events])
        has(database, "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0")
        mine = [event_id for (event_id, _), tenant in zip(events, tenants, strict=True) if tenant == "acme"]
        assert preview(database, since="PT1H", tenant="acme")["matched"] == 2
        numbers = [
            start(database, since="PT1H", tenant="acme"),
            start(database, uids=[uid for _, uid in events], tenant="acme"),
        ]
        for number in numbers:
            ended(database, number)
    assert [clients.ids(number) for number in numbers] == [mine, mine]
    assert [counts(database, number) for number in numbers] == [(2, 2, 0, 0)] * 2
    with_replays = [
        event_id for event_id, uid in events if "replays" in json.loads((why(database, uid)).out)["sinks"]["s"]
    ]
    assert with_replays == mine
    waiting = start(database, since="PT1H", tenant="acme")
    pending = query(
        database,
        "select u ->> 'uid' from jsonb_array_elements(outbox_internal.undelivered(null, null, %s, 1, 0)) u order by 1",
        [e for e, _ in events],
    )
    assert pending == sorted((uid,) for event_id, uid in events if event_id in mine)
    shown = inside("replay", "show", str(waiting), "--dsn", database.dsn)
    assert "tenant acme" in shown.out


def why(database: Database, uid: str) -> Ended:
    """Ask `why`."""
    return inside("why", uid, "--json", "--dsn", database.dsn)
