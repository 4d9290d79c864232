"""The log of one server for the judge: `outbox.event`, and the days that were emptied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psycopg
from psycopg.rows import TupleRow

from tests.chaos.days import KEPT
from tests.chaos.timeline import Logged
from tests.chaos.writer import COUNTS

ROWS = 20_000
EVENTS = f"""select substr(e.key, 5)::int as key, (e.said ->> 'n')::int as number, uuid_send(e.uid) as uid,
       e.shard::int as shard, e.said ->> 'kind' as kind
  from (select key, uid, shard, convert_from(payload, 'UTF8')::json as said from outbox.event where key is not null
        union all
        select key, uid, shard, convert_from(payload, 'UTF8')::json from public.{KEPT} where key is not null) e"""
"""Events of schedules have no key, and are judged apart (see `ticks`)."""
ABOVE = f"""select l.* from ({EVENTS}) l join unnest(%s::int[], %s::int[]) kept (key, number) on kept.key = l.key
 where l.number > kept.number"""
LAST = f"select key, n from public.{COUNTS}".encode()
UNCOVERED = b"""select uuid_send(e.uid)
  from outbox_internal.settled_upto(%(sink)s) s
  join outbox.event e on e.shard = any (s.shards) and e.id > s.upto_id"""
ROWS_LEFT = b"select uuid_send(d.uid) from outbox.delivery d where d.sink = %(sink)s and d.state <> 'dead'"


def events(connection: psycopg.Connection[TupleRow]) -> Iterator[Logged]:
    """Yield every event."""
    with connection.cursor("log", binary=True) as cursor:
        cursor.itersize = ROWS
        cursor.execute(EVENTS)
        yield from map(Logged._make, cursor)


def last_numbers(connection: psycopg.Connection[TupleRow]) -> dict[int, int]:
    """Return the number of the last event of each key."""
    return dict(connection.execute(LAST).fetchall())


def above(connection: psycopg.Connection[TupleRow], numbers: Mapping[int, int]) -> list[Logged]:
    """Return the events of each key after its number in `numbers`."""
    found = connection.execute(ABOVE.encode(), (list(numbers), list(numbers.values())), binary=True)
    return list(map(Logged._make, found))


def unsettled(connection: psycopg.Connection[TupleRow], sink: str) -> frozenset[bytes]:
    """Return the uids of the events that a relay may deliver to `sink` again, starting from the stored positions.

    These are the first unsettled event of each shard and all later ones, and the rows of parked events. Call this
    before events with the transaction ids of another cluster are emitted.
    """
    return _uids(connection, UNCOVERED + b" union " + ROWS_LEFT, sink)


def read_again(connection: psycopg.Connection[TupleRow], sink: str) -> frozenset[bytes]:
    """Return the uids of the rows of `sink` whose events its positions do not cover: these are read again."""
    return _uids(connection, UNCOVERED + b" intersect " + ROWS_LEFT, sink)


def _uids(connection: psycopg.Connection[TupleRow], statement: bytes, sink: str) -> frozenset[bytes]:
    return frozenset(uid for (uid,) in connection.execute(statement, {"sink": sink}, binary=True))
