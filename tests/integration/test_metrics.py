"""Metrics of a relay process, scraped as Prometheus does."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.service.metrics.definitions import DEFINITIONS
from outbox_relay.service.metrics.exposition import OPENMETRICS as OPENMETRICS_TYPE
from outbox_relay.service.metrics.exposition import TEXT
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.metrics import OPENMETRICS, families, promtool_complaints, scrape, value_of
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = 3
[sinks.crm]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
record_attempts = "all"
allow_http = true
allow_networks = ["127.0.0.0/8"]
[sinks.crm.retry]
base_seconds = 0.1
max_seconds = 0.1
[routes]
"*" = ["crm"]
"""


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def config(database: Database, receiver: Receiver) -> str:
    """One webhook for every type, all of whose attempts are recorded."""
    return CONFIG.format(dsn=database.dsn, url=receiver.url, secret=SECRET)


def counted(relay: RelayService, metric: str, label: str, sink: str = "crm") -> dict[str, float]:
    """Return the values of a counter by the second label."""
    samples = families(scrape(relay.port)[1])[metric.removesuffix("_total")].samples
    return {sample.labels[label]: sample.value for sample in samples if sample.labels["sink"] == sink}


def test_counts_agree_with_the_recorded_attempts_and_both_formats_with_each_other(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    failed = set[str]()

    def answer(request: Request) -> Behaviour:
        kind = str(request.header("outbox-type"))
        if kind == "a.refused":
            return say(400)
        if kind in ("a.3", "a.4") and kind not in failed:
            failed.add(kind)
            return say(500)
        return say(204)

    receiver.answer = chosen(answer)
    with RelayService(tmp_path, config(database, receiver)) as relay:
        emit_types(database, *(f"a.{number}" for number in range(10)), "a.refused")
        recorded = "select a.outcome, count(*) from outbox.attempt a group by 1 order by 1"
        expected = [("delivered", 10), ("failed", 2), ("refused", 1)]
        until(lambda: query(database, recorded) == expected, seconds=60, what="all attempts are recorded")
        attempts = {outcome: float(count) for outcome, count in expected}
        until(
            lambda: counted(relay, "outbox_attempts_total", "outcome") == attempts, seconds=20, what="they are exported"
        )
        assert counted(relay, "outbox_dead_total", "reason") == {"refused": 1.0}
        content_type, text = scrape(relay.port)
        assert value_of(text, "outbox_delivered_total", sink="crm") == 10.0
        assert value_of(text, "outbox_end_to_end_seconds_count", sink="crm") == 10.0
        assert value_of(text, "outbox_shards_owned", sink="crm") == 64.0
        for metric in ("tick", "read", "claim", "settle"):
            labels = {} if metric == "tick" else {"sink": "crm"}
            assert value_of(text, f"outbox_{metric}_seconds_count", **labels), metric
        assert (content_type, promtool_complaints(text)) == (TEXT, "")
        content_type, text = scrape(relay.port, OPENMETRICS)
        found = families(text, is_openmetrics=True)
        exemplars = [sample.exemplar for sample in found["outbox_end_to_end_seconds"].samples if sample.exemplar]
        uids = {str(uid) for (uid,) in query(database, "select uid from outbox.event")}
        assert exemplars
        assert {exemplar.labels["uid"] for exemplar in exemplars} <= uids
        assert content_type == OPENMETRICS_TYPE
        assert SECRET not in text
        assert set(found) <= {definition.family for definition in DEFINITIONS}
        assert relay.stop() == 0
