"""The alerts: Prometheus accepts them, each fires in a run with its fault, and none in a run without a fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.alerts.record import metrics
from tests.alerts.scenarios import SCENARIOS
from tests.alerts.series import FIRED
from tests.docs.metrics_table import listed
from tests.docs.pages import ROOT, anchors, text
from tests.support.prometheus import promtool

DEPLOY = ROOT / "deploy/prometheus"
RULES = DEPLOY / "alerts.yaml"
RECORDED = ROOT / "tests/alerts/recorded"
RUNBOOK = "docs/runbook.md"
PLACE = "https://outbox-relay.example.com/"
"""The address of the pages in the rules, which is to be replaced."""

ONLY_IN_TROUBLE = {"outbox_dead_total": "a relay exports it from its first dead letter on"}
"""Metrics of the rules that a run without a fault does not have, with the reason."""


def loaded(path: Path) -> Any:
    """Return the contents of a YAML file."""
    return YAML(typ="safe", pure=True).load(path)  # pyright: ignore[reportUnknownMemberType]


def alerts() -> dict[str, dict[str, Any]]:
    """Return the rules by the name of their alert."""
    return {rule["alert"]: rule for group in loaded(RULES)["groups"] for rule in group["rules"]}


def section(anchor: str) -> str:
    """Return a section of the runbook."""
    return text(RUNBOOK).split(f"\n## {anchor}\n")[1].split("\n## ")[0]


# -- the rules ------------------------------------------------------------------------------------------------


def test_prometheus_accepts_the_rules_and_the_example_that_loads_them() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES)
    assert "is valid prometheus config file syntax" in promtool("check", "config", DEPLOY / "prometheus.yaml")


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == f"{PLACE}{RUNBOOK}", "a whole URL, whose beginning is replaced"
    assert anchor in anchors(RUNBOOK)
    assert f"`{name}`" in section(anchor).partition("**Means**")[0]


def test_the_runbook_names_no_alert_that_does_not_exist() -> None:
    assert set(re.findall(r"`(Outbox[A-Z]\w+)`", text(RUNBOOK))) == alerts().keys()


def test_the_rules_use_metrics_and_labels_that_exist() -> None:
    labels = {row.name: row.labels for row in listed()}
    for name, rule in alerts().items():
        metrics = {metric.removesuffix("_bucket") for metric in re.findall(r"\boutbox_\w+", rule["expr"])}
        assert metrics <= labels.keys(), name
        said = {"database", "instance", "job", "le"}.union(*(labels[metric] for metric in metrics))
        used = {
            label.strip() for each in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"]) for label in each.split(",")
        }
        used |= set(re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values())))
        assert used <= said, name


# -- recorded runs --------------------------------------------------------------------------------------------


def test_each_alert_fires_in_a_recorded_run() -> None:
    assert frozenset[str]().union(*(scenario.fires for scenario in SCENARIOS.values())) == alerts().keys()
    assert {path.stem for path in RECORDED.glob("*.yaml")} == SCENARIOS.keys()
    assert SCENARIOS["healthy"].fires == frozenset()


@pytest.mark.slow  # starts promtool
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_alerts_of_a_fault_fire_and_no_others(name: str) -> None:
    path = RECORDED / f"{name}.yaml"
    [test] = loaded(path)["tests"]
    [asked] = test["promql_expr_test"]
    assert asked["expr"] == FIRED
    expected = {re.sub(r'\{alertname="(\w+)"\}', r"\1", sample["labels"]) for sample in asked["exp_samples"]}
    assert expected == SCENARIOS[name].fires
    assert "SUCCESS" in promtool("test", "rules", path)


def test_the_run_without_a_fault_has_each_metric_that_a_rule_reads() -> None:
    """A rule whose metric is absent is silent for that reason alone."""
    [test] = loaded(RECORDED / "healthy.yaml")["tests"]
    recorded = {series["series"].partition("{")[0] for series in test["input_series"]}
    assert ONLY_IN_TROUBLE.keys() <= metrics() - recorded, "these need no exception"
    missing = metrics() - recorded - ONLY_IN_TROUBLE.keys()
    assert not missing, f"run python -m tests.alerts.record: healthy.yaml is older than {', '.join(sorted(missing))}"
