"""Past days of the log, into which a share of the events is emitted, so that retention empties days as events flow."""

from __future__ import annotations

import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from tests.chaos.nemesis import Strike
from tests.support.command import outbox_relay

POLICY = """
[retention]
keep_days = 1
"""
"""The same for all relays. The days are years ago, so each is past from its first event on."""
SHARE = 0.3
"""Share of the events that are emitted into a day of the past."""
FIRST_DAY = "2001-01-01"
NOW = "chaos.now"
"""Setting of a transaction whose events are emitted today if it is "on"."""
KEPT = "chaos_emptied"
"""Table with the events of emptied days, which the judge reads together with the log."""
TRY_SECONDS = 120.0
"""Time limit of a strike. On a busy machine a backlog or a replay may keep every day for a while."""
AGAIN_SECONDS = 1.0
PREPARE = f"""create table public.{KEPT} (like outbox.event, removed_at timestamptz not null);
create index on public.{KEPT} (created_at);
create function public.keep_emptied() returns trigger language plpgsql as $$
begin
    execute format('insert into public.{KEPT} select *, clock_timestamp() from outbox.%I', tg_table_name);
    return null;
end
$$;
create function public.keep_deleted() returns trigger language plpgsql as $$
begin
    insert into public.{KEPT} select old.*, clock_timestamp();
    return null;
end
$$;
create trigger kept after delete on outbox.event_default for each row execute function public.keep_deleted();
create table public.chaos_day (day date not null);
insert into public.chaos_day values ('{FIRST_DAY}');
create function public.chaos_time() returns timestamptz language sql volatile as $$
    select case when random() < {SHARE} and current_setting('{NOW}', true) is distinct from 'on'
                then (select (d.day + time '12:00') at time zone 'UTC' from public.chaos_day d)
                else clock_timestamp() end
$$;
alter table outbox.event alter column created_at set default public.chaos_time();
update outbox.retention set clock_mark = clock_timestamp()"""
"""Copies of events are made at the moment in which the product removes them. The mark is set because the first pass
takes the time of the newest event for the newest time that the server has seen, which may be of the past here."""
EMPTIED = f"""select from (select (%s::date + time '12:00') at time zone 'UTC' as at) t
 where exists (select from public.{KEPT} k where k.created_at = t.at)
   and not exists (select from outbox.event e where e.created_at = t.at)"""
NEXT = "update public.chaos_day set day = day + 1 returning (day - 1)::text, day::text"


def prepare(dsn: str) -> None:
    """Emit a share of the events into the first day of the past, and keep the events that retention removes."""
    with psycopg.connect(dsn) as connection:
        connection.execute(PREPARE.encode())
        _add(connection, FIRST_DAY)


def _add(connection: psycopg.Connection, day: str) -> None:
    """Make the partition of a day. If a pass removes it before its first event, the DEFAULT partition has the day."""
    part = sql.Identifier("outbox", "event_" + day.replace("-", ""))
    ends = connection.execute("select (%s::date + 1)::text", (day,)).fetchall()[0][0]
    statement = sql.SQL("create table {} partition of outbox.event for values from ({}) to ({})")
    bounds = (sql.Literal(f"{at} 00:00:00+00") for at in (day, ends))
    connection.execute(statement.format(part, *bounds))
    emptied = "create trigger kept before truncate on {} execute function public.keep_emptied()"
    connection.execute(sql.SQL(emptied).format(part))


@dataclass
class Retention:
    """Begins another day of the past, and runs passes until the one before is emptied. Relays do passes too."""

    dsn: str
    config: Path
    fault: str = "retention"

    def strike(self, rng: random.Random) -> Strike:  # noqa: ARG002 - there is nothing to choose
        """Try until the day is emptied. The strike is of another kind if it is always refused."""
        began = time.monotonic()
        day = None
        while time.monotonic() < began + TRY_SECONDS:
            day = day or self._next()
            if day and self._run(day):
                return Strike(self.fault, began, time.monotonic(), day)
            time.sleep(AGAIN_SECONDS)
        return Strike("day not settled", began, time.monotonic(), day or "")

    def _next(self) -> str | None:
        """Begin the next day and return the one before, or None while the server does not allow it."""
        try:
            with psycopg.connect(self.dsn, connect_timeout=5, options="-c lock_timeout=500") as connection:
                ended, begun = connection.execute(NEXT).fetchall()[0]
                _add(connection, begun)
        except psycopg.OperationalError:
            return None  # it is restarting, or a transaction has a lock of the log
        return str(ended)

    def _run(self, day: str) -> bool:
        """Do a pass as an operator would. Return True if the day is emptied by now, by any pass."""
        try:
            outbox_relay("retention", "run", "--json", "-c", self.config)
            with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                return connection.execute(EMPTIED.encode(), (day,)).fetchone() is not None
        except (psycopg.OperationalError, subprocess.TimeoutExpired):
            return False
