"""A real Prometheus scrapes two relays during faults: alerts fire, and every panel of the dashboard has data."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.alerts.scenarios import DROP_CONNECTIONS
from tests.alerts.system import System
from tests.support.panels import panels, substituted
from tests.support.postgres import PostgresServer
from tests.support.prometheus import Prometheus
from tests.support.receiver import Behaviour, Request
from tests.support.receiver.answers import chosen, say
from tests.support.wait import until

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("prometheus")]

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
NAME = "watched_by_prometheus"
SECONDS = 90


class Watched(NamedTuple):
    """Two relays, and the Prometheus that scrapes them."""

    system: System
    prometheus: Prometheus


def shortened() -> str:
    """Return the rules with other times, but the same limits: alerts fire after 2 s, and ranges are 20 s long."""
    rules = re.sub(r"\bfor: \w+", "for: 2s", RULES.read_text())
    return re.sub(r"\[\d+m\]", "[20s]", rules)


def answer(request: Request) -> Behaviour:
    """Refuse events of one type, and answer 503 to those of another."""
    return say({"order.odd": 400, "order.down": 503}.get(str(request.header("outbox-type")), 200))


@pytest.fixture(scope="module")
def watched(postgres: PostgresServer) -> Generator[Watched]:
    try:
        with System(postgres, NAME, relays=2) as system:
            system.receiver.answer = chosen(answer)
            system.start()
            with Prometheus(shortened(), [relay.port for relay in system.relays.values()]) as prometheus:
                yield Watched(system, prometheus)
    finally:
        postgres.drop_database(NAME)


def test_the_queries_of_every_panel_return_data(watched: Watched) -> None:
    system, prometheus = watched
    system.types = ["order.created", "order.odd", "order.down"]
    system.execute(DROP_CONNECTIONS)

    def without_data() -> list[str]:
        asked = [
            (panel.title, substituted(query, rate_interval="20s")) for panel in panels() for query, _ in panel.queries
        ]
        return [title for title, query in asked if not prometheus.query(query)]

    until(lambda: not without_data(), seconds=SECONDS, what="every panel has data")
    for variable, value in (("database", "shop"), ("sink", "crm")):
        found = prometheus.query(f"count by ({variable}) (outbox_shards_owned)")
        assert [series["metric"] for series in found] == [{variable: value}]
    chosen_sink = substituted(panels()[0].queries[0][0], rate_interval="20s", database="shop", sink="crm|other")
    assert prometheus.query(chosen_sink)
    assert prometheus.query(chosen_sink.replace("crm|", "")) == []


def test_alerts_fire_during_the_fault_and_say_what_it_is(watched: Watched) -> None:
    system, prometheus = watched
    system.types = ["order.created"]
    system.receiver.stop()
    until(lambda: "OutboxCircuitOpen" in prometheus.firing(), seconds=SECONDS, what="the destination is reported")
    alert = prometheus.firing()["OutboxCircuitOpen"]
    assert alert["labels"] == {
        "alertname": "OutboxCircuitOpen", "database": "shop", "sink": "crm", "severity": "warning"
    }  # fmt: skip
    assert alert["annotations"]["summary"] == "The destination of sink crm is down"
    assert "OutboxRelayDown" not in prometheus.firing()
    system.kill("relay-2")
    until(lambda: "OutboxRelayDown" in prometheus.firing(), seconds=SECONDS, what="the killed relay is reported")
    alert = prometheus.firing()["OutboxRelayDown"]
    assert alert["annotations"]["summary"] == f"Relay 127.0.0.1:{system.relays['relay-2'].port} does not answer"
    assert "OutboxRelayAbsent" not in prometheus.firing()
