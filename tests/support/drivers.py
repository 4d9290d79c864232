"""The address of a database for the drivers and packages of applications."""

from __future__ import annotations

from typing import Any

from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL

from tests.support.database import Database


def url(database: Database, driver: str) -> URL:
    """Return the address of a database for a driver of SQLAlchemy."""
    found = address(database)
    names = {"username": found["user"], "host": found["host"], "port": found["port"], "database": found["database"]}
    return URL.create(f"postgresql+{driver}", **names)


def address(database: Database) -> dict[str, Any]:
    """Return the address of a database as asyncpg takes it."""
    found = conninfo_to_dict(database.dsn)
    return {"host": found["host"], "port": int(str(found["port"])), "user": found["user"], "database": found["dbname"]}
