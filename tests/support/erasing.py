"""Erasures step by step, and a search for a text in everything that SQL shows of a database."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from psycopg import sql
from psycopg.rows import dict_row

from tests.support.command import Ended, inside
from tests.support.database import Database

STEP = """select * from outbox.erase(%(subject)s, 'tester', 'asked for', %(dry_run)s, %(most_ids)s, %(erasure_id)s)"""
CONTENTS = "select payload, headers, key, content_type from outbox.event order by id"
TABLES = """
select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'm', 't') order by 1, 2"""


def erase(database: Database, *arguments: str, user: str | None = None) -> Ended:
    """Run `outbox-relay erase`, with --yes and a reason."""
    dsn = database.dsn if user is None else database.dsn_as(user)
    return inside("erase", "--reason", "asked for", "--yes", *arguments, "--dsn", dsn)


@dataclass
class Erasure:
    """An erasure that a script takes step by step."""

    database: Database
    subject: dict[str, str]
    dry_run: bool = False
    most_ids: int = 1_000_000
    number: int | None = None
    last: dict[str, Any] = field(default_factory=dict[str, Any])

    def step(self) -> str:
        """Take a step, and return the phase after it."""
        given = {"subject": json.dumps(self.subject), "dry_run": self.dry_run, "most_ids": self.most_ids}
        with self.database.connect(autocommit=True) as connection:
            cursor = connection.cursor(row_factory=dict_row)
            cursor.execute(STEP, {**given, "erasure_id": self.number})
            [self.last] = cursor.fetchall()
        self.number = self.last["erasure_id"]
        return self.last["phase"]

    def until(self, *phases: str) -> dict[str, Any]:
        """Take steps until one ends in one of these phases; return what it said."""
        for _ in range(1000):
            if self.step() in phases:
                return self.last
        raise AssertionError(self.last)

    def run(self) -> dict[str, Any]:
        """Take all steps."""
        return self.until("done", "refused")


def places_of(database: Database, text: str) -> set[str]:
    """Return the tables with a row that shows `text` in any column: as it is, in hexadecimal digits or in base64."""
    raw = text.encode()
    forms = [text, raw.hex(), *(base64.b64encode(b" " * n + raw)[4:-4].decode() for n in range(3))]
    with database.connect(autocommit=True) as connection:
        tables = connection.execute(TABLES).fetchall()
        return {name for schema, name in tables if _shows(connection, sql.Identifier(schema, name), forms)}


def _shows(connection: Any, table: sql.Identifier, forms: list[str]) -> bool:
    shown = "encode(t.chunk_data, 'hex')" if "pg_toast" in table.as_string() else "t::text"
    found = sql.SQL(" or ").join(sql.SQL("strpos(t.shown, {}) > 0").format(form) for form in forms)
    rows = sql.SQL("(select {} as shown from {} t)").format(sql.SQL(shown), table)
    statement = sql.SQL("select exists (select from {} t where {})").format(rows, found)
    return connection.execute(statement).fetchone()[0]
