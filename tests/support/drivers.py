"""The address of a database for the drivers and packages of applications."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest
from packaging.version import Version
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL

from tests.support.database import Database


def skip_without_encodings() -> None:
    """Skip a test with another encoding than UTF-8 where asyncpg sends no text in it."""
    if Version(asyncpg.__version__) < Version("0.29"):
        pytest.skip("before asyncpg 0.29 UTF-8 is the only encoding of a client that works")


def url(database: Database, driver: str) -> URL:
    """Return the address of a database for a driver of SQLAlchemy."""
    found = address(database)
    names = {"username": found["user"], "host": found["host"], "port": found["port"], "database": found["database"]}
    return URL.create(f"postgresql+{driver}", **names)


def address(database: Database) -> dict[str, Any]:
    """Return the address of a database as asyncpg takes it."""
    found = conninfo_to_dict(database.dsn)
    return {"host": found["host"], "port": int(str(found["port"])), "user": found["user"], "database": found["dbname"]}
