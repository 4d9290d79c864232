"""Partitions of the log that cover some seconds, so that retention can empty them while events flow."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import psycopg
from psycopg import sql

from tests.chaos.nemesis import Strike

EXAMPLE = "event_20260101"
"""Name of the partition in the block."""
BLOCK = """begin isolation level read committed;
do $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'this must see what was committed just now';
    end if;
    set local lock_timeout = '50ms';
    lock table outbox.event_20260101 in access exclusive mode;
    if outbox.replay_keepers('outbox.event_20260101', 'infinity') <> '[]' or exists (
        select from outbox.sink k
         cross join lateral outbox.unsettled(k.name) u
         cross join lateral (
            select from outbox.event_20260101 e
             where e.xid >= pg_snapshot_xmin(u.a) and not pg_visible_in_snapshot(e.xid, u.a)
               and e.id > u.after_id and e.id <= u.upto_id and e.shard = any (u.shards)
             limit 1
         ) left_over
    ) then
        raise exception 'a sink or a replay has not settled this day: see outbox-relay status';
    end if;
    truncate outbox.event_20260101;
end
$$;
commit;"""
"""Empties one partition by the rules of `outbox.empty_day`, whose days are longer than a run."""
KEPT = "chaos_emptied"
"""Table with the events of emptied partitions, which the judge reads together with the log."""
DAYS = 20
"""Number of partitions from now on; later events are stored in the DEFAULT partition."""
TRY_SECONDS = 60.0
"""Time limit of a strike. On a busy machine a backlog or a replay may keep every day for a while."""
AGAIN_SECONDS = 0.25
PARTS = b"""select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'outbox.event'::regclass and c.relname ~ '^event_[0-9]{8}$' order by 1"""
KEEP = f"""create table public.{KEPT} (like outbox.event);
create function public.keep_emptied() returns trigger language plpgsql as $$
begin
    execute format('insert into public.{KEPT} select * from outbox.%I', tg_table_name);
    return null;
end
$$"""
"""Copies the events of a partition at the moment in which it is truncated, and not when the block is refused."""
OVER = b"""select c.relname::text from pg_class c
 where c.relnamespace = 'outbox'::regnamespace and c.relname ~ '^event_chaos_' and c.relkind = 'r'
   and pg_relation_size(c.oid) > 0
 order by 1"""


def prepare(dsn: str, seconds: float) -> None:
    """Replace the daily partitions by :data:`DAYS` partitions of `seconds` each."""
    with psycopg.connect(dsn) as connection:
        connection.execute(KEEP.encode())
        # Relays would remove the daily partitions, which have moved to a range of the past.
        connection.execute("update outbox.retention set unset_days = 0, keep_days = 0")
        days = [str(name) for (name,) in connection.execute(PARTS)]
        for number, name in enumerate(days):
            # They keep their names, so that no relay creates them again, and move to a range without events.
            day = sql.Identifier("outbox", name)
            connection.execute(sql.SQL("alter table outbox.event detach partition {}").format(day))
            _attach(connection, name, f"1999-01-{number + 1:02}", f"1999-01-{number + 2:02}")
        [(now,)] = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchall()
        for number in range(DAYS):
            name = f"event_chaos_{number:04}"
            part = sql.Identifier("outbox", name)
            like = "create table {} (like outbox.event including defaults including generated)"
            connection.execute(sql.SQL(like).format(part))
            _attach(connection, name, *(_at(connection, now + seconds * n) for n in (number, number + 1)))
            emptied = "create trigger kept before truncate on {} execute function public.keep_emptied()"
            connection.execute(sql.SQL(emptied).format(part))


def _at(connection: psycopg.Connection, epoch: float) -> str:
    [(at,)] = connection.execute("select to_timestamp(%s)::text", (epoch,)).fetchall()
    return str(at)


def _attach(connection: psycopg.Connection, name: str, begins: str, ends: str) -> None:
    connection.execute(
        sql.SQL("alter table outbox.event attach partition {} for values from ({}) to ({})").format(
            sql.Identifier("outbox", name), sql.Literal(begins), sql.Literal(ends)
        )
    )


@dataclass
class Retention:
    """Runs the block on the partitions with events, which may be the current one, from the oldest on."""

    dsn: str
    fault: str = "retention"

    def strike(self, rng: random.Random) -> Strike:  # noqa: ARG002 - there is nothing to choose
        """Try until a partition is emptied. The strike is of another kind if it is always refused."""
        began = time.monotonic()
        while time.monotonic() < began + TRY_SECONDS:
            if emptied := self._emptied():
                return Strike(self.fault, began, time.monotonic(), emptied)
            time.sleep(AGAIN_SECONDS)
        return Strike("day not settled", began, time.monotonic())

    def _emptied(self) -> str | None:
        """Return the partition that was emptied, or None if each is still needed or in use."""
        try:
            with psycopg.connect(self.dsn, connect_timeout=5, autocommit=True) as connection:
                days = [str(day) for (day,) in connection.execute(OVER).fetchall()]
                return next((day for day in days if _empty(connection, day)), None)
        except psycopg.OperationalError:
            return None  # a server is restarting


def _empty(connection: psycopg.Connection, day: str) -> bool:
    try:
        connection.execute(BLOCK.replace(EXAMPLE, day).encode())
    except (psycopg.errors.RaiseException, psycopg.errors.LockNotAvailable):
        connection.execute("rollback")
        return False
    return True
