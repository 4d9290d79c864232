"""Roles of one test, and the rights that they have."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from psycopg import errors

import outbox_relay
from tests.support.database import Database

STATEMENTS = Path(outbox_relay.__file__).parent / "postgres" / "sql"


@contextmanager
def new_role(database: Database, kind: str, options: str = "login") -> Generator[str]:
    """Create a role for one test, removed with all that it owns in this database."""
    name = f"{kind}_{uuid4().hex}"
    with database.connect(autocommit=True) as admin:
        admin.execute(f"create role {name} {options}".encode())
    try:
        yield name
    finally:
        with database.connect(autocommit=True) as admin:
            admin.execute(f"drop owned by {name} cascade".encode())
            admin.execute(f"drop role {name}".encode())


def denied(database: Database, user: str, statement: str) -> None:
    """Check that the statement is refused because a right is missing, and for no other reason."""
    with database.connect(user=user) as conn, pytest.raises(errors.InsufficientPrivilege):
        conn.execute(statement.encode())


def functions(database: Database) -> list[str]:
    """Return every function of both schemas, with the types of its arguments."""
    with database.connect() as conn:
        found = conn.execute(
            "select oid::regprocedure::text from pg_proc "
            "where pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])"
        )
        return [name for (name,) in found]


def callable_by(database: Database, user: str) -> set[str]:
    """Return the names of the functions that this role may call."""
    with database.connect() as conn:
        found = conn.execute(
            "select proname from pg_proc where pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])"
            " and has_function_privilege(%s, oid, 'execute')",
            [user],
        )
        return {name for (name,) in found}
