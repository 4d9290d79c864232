"""Partitions of the log that cover some seconds, so that retention can empty them while events flow."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import psycopg
from psycopg import sql

from tests.chaos.nemesis import Strike
from tests.docs.pages import blocks

PAGE = "docs/operations.md"
EXAMPLE = "event_20260101"
"""Name of the partition in the example of the page."""
KEPT = "chaos_emptied"
"""Table with the events of emptied partitions, which the judge reads together with the log."""
DAYS = 20
"""Number of partitions from now on; later events are stored in the DEFAULT partition."""
TRIES = 80
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
    """Runs the page's block on the oldest partition with events, which may be the current one."""

    dsn: str
    fault: str = "retention"

    def strike(self, rng: random.Random) -> Strike:  # noqa: ARG002 - there is nothing to choose
        """Try until a partition is emptied, as the page says. The strike is of another kind if it is always refused."""
        began = time.monotonic()
        for _ in range(TRIES):
            if emptied := self._emptied():
                return Strike(self.fault, began, time.monotonic(), emptied)
            time.sleep(AGAIN_SECONDS)  # "then run it again later"
        return Strike("day not settled", began, time.monotonic())

    def _emptied(self) -> str | None:
        try:
            with psycopg.connect(self.dsn, connect_timeout=5, autocommit=True) as connection:
                day = connection.execute(OVER).fetchone()
                if day:
                    connection.execute(block().replace(EXAMPLE, str(day[0])).encode())
                return str(day[0]) if day else None
        except (psycopg.errors.RaiseException, psycopg.OperationalError):
            return None  # not settled yet, in use, or a server is restarting


def block() -> str:
    """Return the page's block that empties a partition."""
    [found] = [found.text for found in blocks(PAGE) if found.language == "sql" and "truncate" in found.text]
    return found
