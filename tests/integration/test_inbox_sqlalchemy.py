"""Consuming with SQLAlchemy: sessions and connections, synchronous and not, over psycopg and asyncpg."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox_relay.contrib import sqlalchemy as contrib
from outbox_relay.contrib.sqlalchemy import InvalidMark, NoTransaction
from tests.support import engines
from tests.support.database import Database, query
from tests.support.engines import engine_of

DRIVERS = ("psycopg", "asyncpg")
MARKS = "select consumer, uid from outbox.inbox order by consumer"

pytestmark = pytest.mark.usefixtures("shop")
engine = engines.engine


class Base(DeclarativeBase):
    """The tables of the consumer."""


class Invoice(Base):
    """An invoice, the effect of an event."""

    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]


@pytest.fixture
def shop(database: Database) -> Database:
    """Return a database with the table of invoices."""
    with database.connect(autocommit=True) as owner:
        owner.execute("create table invoices (id bigint primary key, total bigint not null)")
    return database


def test_an_event_is_handled_once(shop: Database, engine: Engine) -> None:
    uid = uuid.uuid4()
    with Session(engine) as session:
        assert contrib.once(session, "billing", uid)
        session.rollback()
        session.add(Invoice(id=1, total=None))
        assert contrib.once(session, "billing", str(uid)), "changes of the session are written later"
        session.expunge_all()
        session.add(Invoice(id=1, total=5))
        session.commit()
    scoped = scoped_session(sessionmaker(engine))
    assert not contrib.once(scoped, "billing", uid)
    scoped.remove()
    with engine.begin() as connection:
        assert not contrib.once(connection, "billing", uid)
        with pytest.raises(InvalidMark, match="1 to 255 bytes"), connection.begin_nested():
            contrib.once(connection, "", uid)
        assert contrib.once(connection, "mail", uid)
    assert query(shop, MARKS) == [("billing", uid), ("mail", uid)]
    assert query(shop, "select id from invoices") == [(1,)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_event_is_handled_once_asynchronously(shop: Database, driver: str) -> None:
    uid = uuid.uuid4()
    async with engine_of(shop, driver) as engine:
        async with AsyncSession(engine) as session:
            assert await contrib.aonce(session, "billing", uid)
            await session.rollback()
            assert await contrib.aonce(session, "billing", uid)
            await session.commit()
        async with engine.begin() as connection:
            assert not await contrib.aonce(connection, "billing", uid)
            with pytest.raises(InvalidMark, match="1 to 255 bytes"):
                async with connection.begin_nested():
                    await contrib.aonce(connection, "x" * 256, uid)
            assert await contrib.aonce(connection, "mail", uid)
    assert query(shop, MARKS) == [("billing", uid), ("mail", uid)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_mark_in_autocommit_mode_is_refused(shop: Database, engine: Engine, driver: str) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NoTransaction, match=r"`with engine\.begin\(\) as conn:`"),
    ):
        contrib.once(connection, "billing", uuid.uuid4())
    async with engine_of(shop, driver, isolation_level="AUTOCOMMIT") as everywhere, AsyncSession(everywhere) as session:
        with pytest.raises(NoTransaction, match=r"`async with engine\.begin\(\) as conn:`"):
            await contrib.aonce(session, "billing", uuid.uuid4())
    assert query(shop, MARKS) == []
