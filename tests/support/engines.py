"""Engines of SQLAlchemy for the database of a test."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.support.database import Database
from tests.support.drivers import url


@pytest.fixture
def engine(database: Database) -> Generator[Engine]:
    """Yield a synchronous engine."""
    made = create_engine(url(database, "psycopg"))
    yield made
    made.dispose()


@asynccontextmanager
async def engine_of(database: Database, driver: str, **options: Any) -> AsyncGenerator[AsyncEngine]:
    """Yield an asynchronous engine."""
    made = create_async_engine(url(database, driver), **options)
    try:
        yield made
    finally:
        await made.dispose()
