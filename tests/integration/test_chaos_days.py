"""The days of the past in the chaos suite: the product empties them, and the judge still has their events."""

import random
from pathlib import Path

import pytest

from tests.chaos import days, replays
from tests.chaos.days import Retention
from tests.support.database import Database
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_config
from tests.support.service import RelayService
from tests.support.wait import until

EVENTS = 200
EMIT = "select outbox.emit('a.b', to_jsonb(n), key => (n %% 7)::text) from generate_series(1, %s) n"
LOG = f"""select count(*), count(*) filter (where e.created_at < '2002-01-01')
  from (select uid, created_at from outbox.event union all select uid, created_at from public.{days.KEPT}) e"""
PAST = "select count(*) from outbox.event where created_at < '2002-01-01'"


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_retention_empties_a_day_of_the_past_once_it_is_settled(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days.prepare(database.dsn)
    with Receiver() as receiver:
        text = days.POLICY + webhook_config(database.dsn, receiver, tmp_path)
        with RelayService(tmp_path, text) as relay, database.connect(autocommit=True) as connection:
            connection.execute(EMIT, (EVENTS,))
            until(lambda: len(receiver.uids) == EVENTS, seconds=60, what="all is delivered")
            retention = Retention(database.dsn, relay.config)
            for day in ("2001-01-01", "2001-01-02"):
                strike = retention.strike(random.Random(0))
                assert (strike.fault, strike.detail) == ("retention", day)
                assert connection.execute(PAST).fetchall() == [(0,)]
                connection.execute(EMIT, (EVENTS,))
            [(log, past)] = connection.execute(LOG).fetchall()
            assert log == 3 * EVENTS
            assert 0 < past < log
            assert list(connection.execute(replays.EXPECTED.encode(), (1,))) == [], "there was no replay"
            assert relay.stop() == 0
            monkeypatch.setattr(days, "TRY_SECONDS", 5.0)
            connection.execute(EMIT, (EVENTS,))
            assert retention.strike(random.Random(0)).fault == "day not settled"
