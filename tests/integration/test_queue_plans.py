"""The cost of a claim from a queue among very many rows, which those that are dead or due later do not raise.

Rows and pages are counted, never timed, with plans made before the table was analysed and after.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_relay.postgres.database import statements
from tests.support.database import Database
from tests.support.deliveries import touched
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("queue plans")]

MANY = 100_000
"""Rows that are dead, and as many that are due later, of one tenant."""
TENANTS, OF_EACH, PLAIN = 1_000, 10, 10_000
CLAIMED = 50
ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, ready, priority, turn, uid, type, payload,
                             content_type, created_at)
select %(sink)s, %(first)s + g, g %% 64, %(state)s, false, now() + %(due)s::interval, %(ready)s, g %% 3,
       %(tenant)s || case when %(tenants)s > 0 then (g %% nullif(%(tenants)s, 0))::text else '' end, gen_random_uuid(),
       't', '{}', 'application/json', now()
  from generate_series(1, %(count)s) g
"""


def fill(connection: psycopg.Connection[Any], first: int, count: int, **changes: Any) -> None:
    """Make rows with ids above ``first``."""
    values = {"sink": "jobs", "state": "waiting", "due": "-1 hour", "ready": True, "tenant": None, "tenants": 0}
    connection.execute(ROWS.encode(), {**values, "first": first, "count": count, **changes})


@pytest.fixture(scope="module")
def rows(postgres: PostgresServer, template: str) -> Generator[Database]:
    """Yield a queue with rows of every kind, never analysed since it was filled."""
    postgres.create_database("queue_plans", template=template)
    with postgres.connect("queue_plans") as connection:
        connection.execute("alter table outbox.delivery set (autovacuum_enabled = off)")
        connection.execute("analyze")
        fill(connection, 1_000_000, MANY, state="dead")
        fill(connection, 2_000_000, MANY, ready=False, tenant="t1", due="1 day")
        fill(connection, 3_000_000, TENANTS * OF_EACH, tenant="t", tenants=TENANTS)
        fill(connection, 4_000_000, PLAIN)
    yield Database(postgres, "queue_plans")
    postgres.drop_database("queue_plans")


@pytest.fixture(params=["stale statistics", "true statistics"])
def connection(request: pytest.FixtureRequest, rows: Database) -> Generator[psycopg.Connection[Any]]:
    """Yield a connection whose transaction is rolled back."""
    if request.param == "true statistics":
        with rows.connect(autocommit=True) as connection:
            connection.execute("analyze outbox.delivery")
    with rows.connect() as connection:
        yield connection
        connection.rollback()


def claim(connection: psycopg.Connection[Any], **changes: Any) -> list[tuple[Any, ...]]:
    """Claim rows."""
    values = {
        "sink": "jobs", "owner": UUID(int=1), "lease": UUID(int=2), "lease_for": 60.0, "rows": CLAIMED,
        "bytes": 1 << 30, "most_payload": 1 << 30, "fair": False, "after": None,
    }  # fmt: skip
    return connection.execute(statements()["claim_queued"], {**values, **changes}).fetchall()


@pytest.mark.parametrize("fair", [False, True], ids=["by priority", "by turns"])
def test_a_claim_reads_what_it_claims_and_little_else(connection: psycopg.Connection[Any], *, fair: bool) -> None:
    found = claim(connection, fair=fair)
    assert len(found) == CLAIMED
    read, pages = touched(connection)
    assert read < 12 * CLAIMED
    assert pages < 80 * CLAIMED


def test_a_walk_meets_each_tenant_once(connection: psycopg.Connection[Any]) -> None:
    seen: list[int] = []
    tenant = None
    for _ in range(TENANTS // CLAIMED):
        found = claim(connection, fair=True, after=tenant)
        tenant = found[0][-1]
        seen += [row[0] for row in found]
    tenants = connection.execute("select distinct turn from outbox.delivery where id = any (%s)", (seen,)).fetchall()
    assert len(tenants) == TENANTS
