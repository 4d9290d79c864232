"""docs/consumers.md: every block of code is run twice as it stands there, and has its effect once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.page_programs import run_python
from tests.support.roles import new_role

PAGE = Path(__file__).parents[2] / "docs" / "consumers.md"
BLOCKS = re.findall(r"<!-- run: ([a-z ]+) -->\n```(\w+)\n(.*?)```\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
SQL_UID = UUID("01a1fe9a-d7b3-795c-8af1-aa7f5518f66b")
"""The uid of the block of SQL."""

# What a consumer's program has around a block, behind what programs of its kind have on the page about emitting.
ALSO = {
    "psycopg": "",
    "asyncpg": "",
    "kafka": """
        class Record:
            def headers(self): return [("id", uid.encode())]
            def value(self): return b'{"total": 1250}'
            def error(self): return None
        class Consumer:
            def __init__(self, settings): assert settings["enable.auto.commit"] is False
            def subscribe(self, topics): pass
            def consume(self, most, timeout): return [Record(), Record()]
            def commit(self, message): pass
        KafkaException = RuntimeError
    """,
    "webhook": """
        from standardwebhooks import Webhook
        secret, body = "whsec_ZXhhbXBsZS1vZi1hLW5ldy1zZWNyZXQtLS0t", b'{"total": 1250}'
        now = datetime.now(UTC)
        headers = {"webhook-id": uid, "webhook-timestamp": str(int(now.timestamp())),
                   "webhook-signature": Webhook(secret).sign(uid, now, body.decode())}
    """,
    "sqlalchemy": """
        import uuid
        uid = uuid.UUID(uid)
        class Invoice(Base):
            __tablename__ = "invoices"
            event: Mapped[uuid.UUID] = mapped_column(primary_key=True)
            total: Mapped[int]
    """,
    "django": """
        import types
        request = types.SimpleNamespace(headers={"webhook-id": uid})
        class Invoice(models.Model):
            event = models.UUIDField(primary_key=True)
            total = models.IntegerField()
            class Meta:
                app_label = "billing"
                db_table = "invoices"
    """,
}
PROGRAMS = {"kafka": "psycopg", "webhook": "psycopg"}
"""The kind of a program that the page about emitting does not have."""


def run(kind: str, language: str, block: str, database: Database, user: str, uid: UUID) -> None:
    """Run a block of the page."""
    if language == "python":
        run_python(PROGRAMS.get(kind, kind), block, database.dsn_as(user), f'uid = "{uid}"\n{_dedented(ALSO[kind])}')
        return
    with database.connect(user="postgres" if kind.startswith("superuser") else user) as conn:
        conn.execute(block.encode())


def _dedented(text: str) -> str:
    return re.sub(r"^ {8}", "", text, flags=re.MULTILINE)


def invoices(database: Database) -> list[tuple[Any, ...]]:
    """Return the effects, in the order of their events."""
    return query(database, "select event, total from invoices order by event")


@pytest.mark.slow  # runs what a page shows
def test_the_page_is_true(database: Database) -> None:
    with new_role(database, "consumer") as user:
        migrate(database.dsn, grants={"consume": [user]})
        with database.connect() as owner:
            owner.execute("create table invoices (event uuid, total integer)")
            owner.execute(f"grant select, insert on invoices to {user}".encode())
        for number, (kind, language, block) in enumerate(BLOCKS):
            uid = SQL_UID if language == "sql" else UUID(int=number + 1)
            wanted = [] if kind.startswith("superuser") else [(uid, 1250)]
            for _ in range(2):
                run(kind, language, block, database, user, uid)
                assert invoices(database) == wanted, block
            query(database, "delete from invoices returning 1")
    assert query(database, "select keep_uids_days from outbox.retention") == [(90,)]


def test_every_block_of_code_is_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(BLOCKS)
    assert {kind for kind, language, _ in BLOCKS if language == "python"} == set(ALSO)
