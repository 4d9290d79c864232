"""Replays that are started during a run: every matching event arrives with the header, and no other event does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
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
TICK = "select seq, snapshot::text, next_xid, incarnation, generations from outbox.action_tick()"
START = "select id from outbox.start_replay(%s, null, null, %s, %s::pg_snapshot, %s, %s, %s, 'chaos', null)"
UIDS = """select uid::text from outbox.event
 where id > (select max(id) from outbox.event) - 20000 order by random() limit %s"""
ENDED = """select r.id, r.target, r.state, r.counted, r.counted - n.delivered - n.failed as others, n.failed
  from outbox.replay r join outbox.replays(null, false, 1000) n on n.id = r.id
 where extract(epoch from r.created_at) > %s order by r.id"""
EXPECTED = f"""select uuid_send(e.uid)
  from (select xid, id, shard, uid, type, key, content_type, created_at, 'infinity' as removed_at from outbox.event
        union all
        select xid, id, shard, uid, type, key, content_type, created_at, removed_at from public.{KEPT}) e
  join outbox.replay r on r.id = %s and r.created_at < e.removed_at
 where e.id > r.from_id and e.id <= r.upto_id and (r.ids is null or e.id = any (r.ids))
   and outbox.replay_means(e.id, e.xid, e.shard, e.type, e.key, e.content_type, e.created_at, r.type_like, r.routed,
                           r.key, r.since, r.until, r.floor, r.a_seqs, r.a_snapshots, r.a_nexts, r.b_snapshots,
                           r.last_ids)"""


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
        tick = connection.execute(TICK).fetchone()
        assert tick is not None
        started = connection.execute(START, (json.dumps(wanted), *tick)).fetchone()
        assert started is not None
        return int(started[0])


def violations(dsn: str, arrived: Mapping[tuple[str, int], set[bytes]], since: float) -> Iterator[str]:
    """Yield a line for each replay, started after `since` in unix seconds, that did not deliver what it should.

    `arrived` are the uids that arrived at a sink with the number of a replay.
    """
    with psycopg.connect(dsn) as connection:
        for number, sink, state, counted, others, failed in connection.execute(ENDED, (since,)).fetchall():
            expected = {uid for (uid,) in connection.execute(EXPECTED.encode(), (number,), binary=True)}
            came = arrived.get((sink, number), set[bytes]())
            name = f"replay {number} of {sink}"
            if state != "done":
                yield f"{name} is {state} at the end"
            if strangers := came - expected:
                yield f"{name}: {len(strangers)} events arrived that it does not mean"
            if counted != len(expected):
                yield f"{name}: it counted {counted} events, and means {len(expected)}"
            if len(missing := expected - came) > others + failed:
                yield f"{name}: {len(missing)} events did not arrive, but {others} were passed by and {failed} died"
