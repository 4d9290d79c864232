"""Metrics of a relay process, scraped as Prometheus does."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from psycopg.conninfo import make_conninfo

from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.docs.metrics_table import listed
from tests.support.command import outbox_relay
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.metrics import OPENMETRICS, families, promtool_complaints, scrape, value_of
from tests.support.proxy import Proxy
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import Behaviour, chosen, say
from tests.support.receiver.signatures import SECRET
from tests.support.relay_harness import LOST
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
permanent_statuses = [400]
record_attempts = "all"
allow_http = true
allow_networks = ["127.0.0.0/8"]
[sinks.crm.retry]
base_seconds = 0.1
max_seconds = 0.1
[routes]
"*" = ["crm"]
"""
AT_ONCE_SECONDS = 2.0
"""More than an answer takes on a busy machine, and less than any time limit of a statement that gets no answer."""


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def config(database: Database, receiver: Receiver, dsn: str = "") -> str:
    """Return the settings of one webhook for every type, all of whose attempts are recorded."""
    return CONFIG.format(dsn=dsn or database.dsn, url=receiver.url, secret=SECRET)


def counted(relay: RelayService, metric: str, label: str, sink: str = "crm") -> dict[str, float]:
    """Return the values of a counter by the second label."""
    samples = families(scrape(relay.port)[1])[metric.removesuffix("_total")].samples
    return {sample.labels[label]: sample.value for sample in samples if sample.labels["sink"] == sink}


def value(relay: RelayService, name: str, **labels: str) -> float | None:
    """Return the value of one sample of a relay."""
    return value_of(scrape(relay.port)[1], name, **labels)


def answer(request: Request) -> Behaviour:
    """Refuse one type, and fail twice of two others."""
    kind = str(request.header("outbox-type"))
    if kind == "a.refused":
        return say(400)
    return say(500) if kind in ("a.3", "a.4") and request.header("outbox-attempt") == "1" else say(204)


def test_a_relay_exports_what_it_does_and_asks_the_database_nothing_for_a_scrape(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answer = chosen(answer)
    with Proxy() as proxy:
        proxy.target = database.server.port
        dsn = make_conninfo(host=LOOPBACK, port=proxy.port, dbname=database.name, user="postgres")
        text = CONFIG.format(dsn=dsn, url=receiver.url, secret=SECRET)
        with RelayService(tmp_path, text, expects=("reload", "lease_lost", *LOST)) as relay:
            _counts_agree(database, relay)
            relay.config.write_text("nonsense")
            relay.send(signal.SIGHUP)
            successful = "outbox_config_last_reload_successful"
            until(lambda: value(relay, successful) == 0.0, seconds=20, what="the refused reload is exported")
            assert outbox_relay("sinks", "remove", "crm", "--yes", "--dsn", database.dsn).code == 0
            until(lambda: value(relay, "outbox_shards_owned", sink="crm") is None, seconds=40, what="it disappears")
            assert value(relay, "outbox_log_bytes")
            proxy.swallowing = True
            assert proxy.blackhole() > 0
            began = time.monotonic()
            assert value(relay, "outbox_log_bytes")
            assert time.monotonic() - began < AT_ONCE_SECONDS


def _counts_agree(database: Database, relay: RelayService) -> None:
    """Compare the metrics of 11 events with the recorded attempts, and the two formats with the documented metrics."""
    emit_types(database, *(f"a.{number}" for number in range(10)), "a.refused")
    recorded = "select a.outcome, count(*) from outbox.attempt a group by 1 order by 1"
    expected = [("delivered", 10), ("failed", 2), ("refused", 1)]
    until(lambda: query(database, recorded) == expected, seconds=60, what="all attempts are recorded")
    attempts = {outcome: float(count) for outcome, count in expected}
    until(lambda: counted(relay, "outbox_attempts_total", "outcome") == attempts, seconds=20, what="they are exported")
    assert counted(relay, "outbox_dead_total", "reason") == {"refused": 1.0}
    until(lambda: value(relay, "outbox_backlog_events", sink="crm") == 0.0, seconds=90, what="figures are exported")
    content_type, text = scrape(relay.port)
    assert (content_type, promtool_complaints(text)) == (CONTENT_TYPE_PLAIN_0_0_4, "")
    assert value_of(text, "outbox_delivered_total", sink="crm") == 10.0
    assert value_of(text, "outbox_end_to_end_seconds_count", sink="crm") == 10.0
    assert value_of(text, "outbox_shards_owned", sink="crm") == 64.0
    for metric in ("tick", "read", "claim", "settle"):
        assert value_of(text, f"outbox_{metric}_seconds_count", **({} if metric == "tick" else {"sink": "crm"})), metric
    content_type, text = scrape(relay.port, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert SECRET not in text
    found = families(text, is_openmetrics=True)
    exemplars = [sample.exemplar for sample in found["outbox_end_to_end_seconds"].samples if sample.exemplar]
    assert exemplars
    uids = {str(uid) for (uid,) in query(database, "select uid from outbox.event")}
    assert {exemplar.labels["uid"] for exemplar in exemplars} <= uids
    labels = {name: set[str]().union(*(each.labels for each in found[name].samples)) - {"le"} for name in found}
    documented = {row.name.removesuffix("_total").removesuffix("_info"): set(row.labels) for row in listed()}
    assert labels == {**documented, "outbox_session_restarts": set()}, "no session has restarted"
