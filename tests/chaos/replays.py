"""Replays that are started during a run: every matching event arrives with the header, and no other event does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import psycopg

from tests.chaos.days import KEPT
from tests.chaos.nemesis import Strike

TRIES = 40
AGAIN_SECONDS = 0.5
NAMED = 200
"""Number of events that are named by their uids."""
SECONDS = (5, 20)
"""Age of the oldest event of a replay by time."""
START = "select id from outbox.start_replay(%s, null, null, 'chaos', null)"
UIDS = """select uid::text from outbox.event
 where id > (select max(id) from outbox.event) - 20000 order by random() limit %s"""
ENDED = """select r.id, r.target, r.state, r.counted, n.delivered, n.failed, coalesce(n.passed_by, 0)
  from outbox.replay r join outbox.replays(null, false, 1000) n on n.id = r.id
 where extract(epoch from r.created_at) > %s order by r.id"""
EXCEPTIONS, ROWS = "chaos_exception", "chaos_row"
"""Tables with the exceptions of replays, and with the rows that sinks had: relays delete them from the schema."""
KEEP = f"""create table public.{EXCEPTIONS} (like outbox.replay_exception including indexes);
create function public.keep_exception() returns trigger language plpgsql security definer as $$
begin
    insert into public.{EXCEPTIONS} values (new.*) on conflict do nothing;
    return null;
end
$$;
create trigger kept after insert on outbox.replay_exception for each row execute function public.keep_exception();
create table public.{ROWS} (sink text, uid uuid, primary key (sink, uid));
create function public.keep_row() returns trigger language plpgsql security definer as $$
begin
    insert into public.{ROWS} values (new.sink, new.uid) on conflict do nothing;
    return null;
end
$$;
create trigger kept after insert or update of sink on outbox.delivery
    for each row when (new.sink < '~') execute function public.keep_row()"""
LOG = f"""(select id, uid from outbox.event union all select id, uid from public.{KEPT}) e"""
PASSED = f"""select uuid_send(e.uid) from {LOG} join public.{EXCEPTIONS} x on x.id = e.id
 where x.replay = %s and x.outcome = 'passed by'"""
DIED = f"""select uuid_send(e.uid) from {LOG} join public.{EXCEPTIONS} x on x.id = e.id
 where x.replay = %s and x.outcome = 'failed'"""
ROWED = f"""select uuid_send(w.uid) from public.{ROWS} w where w.sink = %s
 union select uuid_send(m.uid) from outbox.discarded m where m.sink = %s"""
EXPECTED = f"""select uuid_send(e.uid)
  from (select xid, id, shard, uid, type, key, content_type, created_at, 'infinity' as removed_at from outbox.event
        union all
        select xid, id, shard, uid, type, key, content_type, created_at, removed_at from public.{KEPT}) e
  join outbox.replay r on r.id = %s and r.created_at < e.removed_at
 where e.id > r.from_id and e.id <= r.upto_id and (r.ids is null or e.id = any (r.ids))
   and outbox_internal.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like,
                           r.routed, r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts,
                           r.b_snapshots, r.last_ids)"""


@dataclass
class Replay:
    """Starts a replay of one sink: of some seconds, of one key, or of named events."""

    dsn: str
    keys: int
    fault: str = "replay"

    def strike(self, rng: random.Random) -> Strike:
        """Try until a replay is started. The strike is of another kind if it is always refused."""
        began = time.monotonic()
        sink = rng.choice(("kafka", "webhook"))
        for _ in range(TRIES):
            try:
                with psycopg.connect(self.dsn, connect_timeout=5, autocommit=True) as connection:
                    number = self._start(connection, sink, rng)
            except psycopg.Error:  # a server is restarting, or the configuration changed meanwhile
                time.sleep(AGAIN_SECONDS)
            else:
                return Strike(self.fault, began, time.monotonic(), f"{number} of {sink}")
        return Strike("no replay", began, time.monotonic())

    def _start(self, connection: psycopg.Connection, sink: str, rng: random.Random) -> int:
        wanted: dict[str, object] = {"sink": sink}
        match rng.choice(("since", "key", "uids")):
            case "since":
                wanted["since"] = f"PT{rng.randint(*SECONDS)}S"
            case "key":
                wanted["key"] = f"key-{rng.randrange(0, self.keys, 4)}"
            case _:
                wanted["uids"] = [uid for (uid,) in connection.execute(UIDS, (NAMED,))]
        started = connection.execute(START, (json.dumps(wanted),)).fetchone()
        assert started is not None
        return int(started[0])


@dataclass(frozen=True)
class Found:
    """A replay as the database has it: its counts, and the uids of the events that it means, passed by, or that died.

    ``rowed`` are the events that the target had a row or a mark of at any time.
    """

    number: int
    sink: str
    state: str
    total: int
    delivered: int
    failed: int
    passed_by: int
    expected: set[bytes]
    passed: set[bytes]
    died: set[bytes]
    rowed: set[bytes]


def prepare(dsn: str) -> None:
    """Keep every row of a sink and every exception of a replay, which relays delete."""
    with psycopg.connect(dsn) as connection:
        connection.execute(KEEP.encode())


def violations(dsn: str, arrived: Mapping[tuple[str, int], set[bytes]], since: float) -> Iterator[str]:
    """Yield a line for each replay, started after `since` in unix seconds, that did not deliver what it should.

    `arrived` are the uids that arrived at a sink with the number of a replay.
    """
    with psycopg.connect(dsn) as connection:
        for row in connection.execute(ENDED, (since,)).fetchall():
            number, sink = row[:2]
            parts = ((EXPECTED, (number,)), (PASSED, (number,)), (DIED, (number,)), (ROWED, (sink, sink)))
            uids = ({uid for (uid,) in connection.execute(text.encode(), of, binary=True)} for text, of in parts)
            yield from judge(Found(*row, *uids), arrived.get((sink, number), set[bytes]()))


def judge(found: Found, came: Collection[bytes]) -> Iterator[str]:
    """Yield a line for everything that a replay did not do as it should. `came` are the uids that arrived by it."""
    name, came = f"replay {found.number} of {found.sink}", set(came)
    if found.state != "done":
        yield f"{name} is {found.state} at the end"
    if strangers := came - found.expected:
        yield f"{name}: {len(strangers)} events arrived that it does not mean"
    if found.total != len(found.expected):
        yield f"{name}: it counted {found.total} events, and means {len(found.expected)}"
    if missing := found.expected - came - found.passed - found.died:
        yield f"{name}: {len(missing)} events did not arrive, were not passed by and did not die"
    if unfounded := found.passed - found.rowed:
        yield f"{name}: {len(unfounded)} events were passed by that had neither a row nor a mark"
    if (found.passed_by, found.failed) != (len(found.passed), len(found.died)):
        yield (
            f"{name}: it counted {found.passed_by} events as passed by and {found.failed} as failed, and they are "
            f"{len(found.passed)} and {len(found.died)}"
        )
    if found.delivered > len(came):
        yield f"{name}: it counted {found.delivered} events as delivered, and {len(came)} arrived"
    if found.total != (parts := found.delivered + found.failed + found.passed_by):
        yield f"{name}: it counted {found.total} events, and {parts} were delivered, failed or passed by"
