"""Metrics of a relay process, scraped as Prometheus does."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from outbox_relay.service.metrics.definitions import DEFINITIONS
from outbox_relay.service.metrics.exposition import OPENMETRICS as OPENMETRICS_TYPE
from outbox_relay.service.metrics.exposition import TEXT
from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.support.database import Database, query
from tests.support.emitting import emit_types
from tests.support.metrics import OPENMETRICS, families, promtool_complaints, scrape, value_of
from tests.support.proxy import Proxy
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


def exported(relay: RelayService) -> set[str]:
    """Return the names of the metric families of a relay."""
    return set(families(scrape(relay.port, OPENMETRICS)[1], is_openmetrics=True))


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
        everything = {definition.family for definition in DEFINITIONS}
        until(lambda: exported(relay) == everything, seconds=30, what="the figures are exported")
        assert relay.stop() == 0


def test_a_scrape_asks_the_database_nothing_and_has_the_last_figures(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    """No connection to the database passes anything any more, and the answer was not rendered before."""
    with Proxy() as proxy:
        proxy.target = database.server.port
        dsn = make_conninfo(host=LOOPBACK, port=proxy.port, dbname=database.name, user="postgres")
        with RelayService(tmp_path, config(database, receiver, dsn)) as relay:
            until(lambda: backlog(scrape(relay.port)[1]) == 0.0, seconds=20, what="figures are exported")
            proxy.swallowing = True
            assert proxy.blackhole() > 0
            emit_types(database, "a.1", "a.2")
            began = time.monotonic()
            content_type, text = scrape(relay.port, OPENMETRICS)
            assert time.monotonic() - began < AT_ONCE_SECONDS
            assert (content_type, backlog(text, is_openmetrics=True)) == (OPENMETRICS_TYPE, 0.0)


def backlog(text: str, *, is_openmetrics: bool = False) -> float | None:
    """Return the figure of the events that the sink has not delivered, or None if it is unknown."""
    found = families(text, is_openmetrics=is_openmetrics).get("outbox_backlog_events")
    return found.samples[0].value if found and found.samples else None


@pytest.mark.slow
def test_two_relays_share_the_shards_and_export_the_same_figures(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    text = config(database, receiver)
    with RelayService(tmp_path, text, "one") as one, RelayService(tmp_path, text, "two") as two:
        emit_types(database, *(f"a.{number}" for number in range(20)))

        def shared() -> bool:
            owned = [value_of(scrape(each.port)[1], "outbox_shards_owned", sink="crm") for each in (one, two)]
            delivered = [
                value_of(scrape(each.port)[1], "outbox_delivered_total", sink="crm") or 0.0 for each in (one, two)
            ]
            return owned == [32.0, 32.0] and sum(delivered) == 20.0

        until(shared, seconds=60, what="both own half of the shards, and count what they deliver")

        def agree() -> bool:
            unowned = [value_of(scrape(each.port)[1], "outbox_shards_unowned", sink="crm") for each in (one, two)]
            sizes = {value_of(scrape(each.port)[1], "outbox_log_bytes") for each in (one, two)}
            return unowned == [0.0, 0.0] and len(sizes) == 1 and None not in sizes

        until(agree, seconds=60, what="both export the same figures")
        [(owner,)] = query(database, "select r.name from outbox.figures f join outbox.relay r on r.id = f.owner")
        ages = {each: value_of(scrape(each.port)[1], "outbox_figures_age_seconds", group="log") for each in (one, two)}
        assert owner
        assert all(age is not None and 0.0 <= age < 30.0 for age in ages.values())
        assert one.stop() == 0
        assert two.stop() == 0


def delivered(relay: RelayService) -> dict[str, float]:
    """Return the delivered events of each sink."""
    found = families(scrape(relay.port)[1])["outbox_delivered"]
    return {sample.labels["sink"]: sample.value for sample in found.samples}
