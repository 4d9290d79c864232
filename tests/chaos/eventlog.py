"""The log of one server as the judge reads it: `outbox.event`, and the days of it that were emptied."""

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
  from (select key, uid, shard, convert_from(payload, 'UTF8')::json as said from outbox.event
        union all
        select key, uid, shard, convert_from(payload, 'UTF8')::json from public.{KEPT}) e"""
ABOVE = f"""select l.* from ({EVENTS}) l join unnest(%s::int[], %s::int[]) kept (key, number) on kept.key = l.key
 where l.number > kept.number"""
LAST = f"select key, n from public.{COUNTS}".encode()
UNSETTLED = b"""select uuid_send(e.uid)
  from outbox.settled_upto(%(sink)s) s
  join outbox.event e on e.shard = any (s.shards) and e.id > s.upto_id
union
select uuid_send(d.uid) from outbox.delivery d where d.sink = %(sink)s and d.state <> 'dead'"""


def events(connection: psycopg.Connection[TupleRow]) -> Iterator[Logged]:
    """Read every event."""
    with connection.cursor("log", binary=True) as cursor:
        cursor.itersize = ROWS
        cursor.execute(EVENTS)
        yield from map(Logged._make, cursor)


def last_numbers(connection: psycopg.Connection[TupleRow]) -> dict[int, int]:
    """Return the number of the last event of each key."""
    return dict(connection.execute(LAST).fetchall())


def above(connection: psycopg.Connection[TupleRow], numbers: Mapping[int, int]) -> list[Logged]:
    """Return the events of each key behind its number in `numbers`."""
    found = connection.execute(ABOVE.encode(), (list(numbers), list(numbers.values())), binary=True)
    return list(map(Logged._make, found))


def unsettled(connection: psycopg.Connection[TupleRow], sink: str) -> frozenset[bytes]:
    """Return the uids of what a relay may deliver again to `sink` when it begins from the stored positions.

    These are the events of each shard from the first one on that is not settled, and the rows of events that were
    parked. Ask before anything is emitted that has transaction numbers of another cluster.
    """
    return frozenset(uid for (uid,) in connection.execute(UNSETTLED, {"sink": sink}, binary=True))
