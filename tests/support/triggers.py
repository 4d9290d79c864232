"""Triggers that do at a certain moment what another session might."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

FINISH = """create function pg_temp.finish() returns trigger language plpgsql as $$
begin
    delete from outbox.delivery d where d.sink = tg_argv[0] and d.id not in (select n.id from added n);
    return null;
end
$$"""


def finish_when_rows_are_added(connection: psycopg.Connection[Any], sink: str) -> None:
    """Delete the rows of ``sink`` that are there already whenever some are added, as if they were delivered then.

    The trigger lasts as long as the session of ``connection``, and acts in every session.
    """
    connection.execute(FINISH)
    connection.execute(
        sql.SQL(
            "create trigger finish after insert on outbox.delivery referencing new table as added "
            "for each statement execute function pg_temp.finish({})"
        ).format(sql.Literal(sink))
    )
