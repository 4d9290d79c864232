"""Metrics of a relay process, read with the parsers of prometheus-client, and checked with promtool."""

from __future__ import annotations

import http.client
from collections.abc import Iterable
from typing import Any, cast

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from outbox_relay.relay.measures import RelayMeasures
from outbox_relay.service.figures import FIGURES
from outbox_relay.service.metrics import SinkStates, register
from tests.support.prometheus import promtool

OPENMETRICS = "application/openmetrics-text"


def defined() -> dict[str, str]:
    """Return the types of all metrics of a relay by name, in no order."""
    registry = RelayMeasures().registry
    register(registry, [SinkStates({})], lambda: True)
    suffixes = {"counter": "_total", "info": "_info"}
    found = {family.name + suffixes.get(family.type, ""): family.type for family in registry.collect()}
    return {**found, **dict.fromkeys([*FIGURES, "outbox_figures_age_seconds", "outbox_figures_failed"], "gauge")}


def scrape(port: int, accept: str = "") -> tuple[str, str]:
    """Return content type and text of ``/metrics``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics", headers={"accept": accept} if accept else {})
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        return answer.headers["content-type"], answer.read().decode()
    finally:
        connection.close()


def families(text: str, *, is_openmetrics: bool = False) -> dict[str, Metric]:
    """Return metric families by name, as the parser of the format reads them."""
    parse: Any = cast("Any", openmetrics).text_string_to_metric_families
    found: Iterable[Metric] = parse(text) if is_openmetrics else text_string_to_metric_families(text)
    return {family.name: family for family in found}


def value_of(text: str, name: str, **labels: str) -> float | None:
    """Return the value of one sample in the text format, or None."""
    for family in families(text).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def promtool_complaints(text: str) -> str:
    """Return everything that ``promtool check metrics`` says of a text."""
    return promtool("check", "metrics", stdin=text)
