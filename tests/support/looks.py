"""The cost of a statement in rows that it looks at."""

from __future__ import annotations

from typing import Any

import psycopg

TOUCHED = """
select coalesce(sum(seq_tup_read), 0)::bigint + coalesce(sum(idx_tup_fetch), 0)::bigint
  from pg_stat_xact_user_tables
 where schemaname = 'outbox' and relname like any (%s)
"""


def touched(connection: psycopg.Connection[Any], *tables: str) -> int:
    """Return the rows of tables with names like these that the current transaction has looked at so far."""
    [(count,)] = connection.execute(TOUCHED, (list(tables),)).fetchall()
    return count
