"""The alerts: Prometheus accepts them, each fires in a run with its fault, and none in a run without a fault."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.alerts.record import metrics
from tests.alerts.scenarios import SCENARIOS
from tests.alerts.series import FIRED, Series, document, notation
from tests.docs.pages import ROOT, anchors, blocks, commands, text
from tests.docs.test_metrics import listed
from tests.support.prometheus import promtool

DEPLOY = ROOT / "deploy/prometheus"
RULES = DEPLOY / "alerts.yaml"
RECORDED = ROOT / "tests/alerts/recorded"
RUNBOOK = "docs/runbook.md"
PAGE = "docs/observability.md"
TIMES = {"at once": None, "2 min": "2m", "5 min": "5m", "10 min": "10m", "2 h": "2h"}
"""Times of the page as Prometheus has them."""
SED = "/bin/sed"
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


def test_the_page_lists_every_alert_with_its_severity_its_time_and_its_section() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(([^)]+)\) \| (\w+) \| [^|]+ \| ([^|]+) \|$", text(PAGE), re.MULTILINE)
    assert [(name, f"{PLACE}docs/{link}", severity, TIMES[time]) for name, link, severity, time in rows] == [
        (name, rule["annotations"]["runbook_url"], rule["labels"]["severity"], rule.get("for"))
        for name, rule in alerts().items()
    ]
    assert f"has {len(alerts())} [alerts]" in text("CHANGELOG.md")


def test_the_rules_use_metrics_and_labels_that_exist() -> None:
    labels = {row.name: row.labels for row in listed()}
    for name, rule in alerts().items():
        metrics = {metric.removesuffix("_bucket") for metric in re.findall(r"\boutbox_\w+", rule["expr"])}
        assert metrics <= labels.keys(), name
        said = {"database", "instance", "job", "le"}.union(*(labels[metric] for metric in metrics))
        used = {
            label.strip()
            for each in re.findall(r"(?:by|on) \(([^)]*)\)", rule["expr"])
            for label in each.split(",")
        }
        used |= set(re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values())))
        assert used <= said, name


def test_a_place_is_put_before_the_runbook_as_the_page_says(tmp_path: Path) -> None:
    file = tmp_path / "alerts.yaml"
    file.write_text(RULES.read_text())
    [command] = [
        line for block in blocks(PAGE) if block.language == "sh" for line in commands(block) if line.startswith("sed ")
    ]
    assert f"#   {command}\n" in file.read_text()
    assert PLACE.removesuffix("/") in text(PAGE)
    _, *arguments = shlex.split(command)
    for _ in range(2):
        subprocess.run([SED, *arguments], check=True, timeout=20, cwd=tmp_path)
        places = re.findall(r"^ +runbook_url: (.+)$", file.read_text(), re.MULTILINE)
        assert len(places) == len(alerts())
        wanted = r"https://wiki\.example\.com/outbox-relay/docs/runbook\.md#[a-z-]+"
        assert [place for place in places if not re.fullmatch(wanted, place)] == []


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


# -- the notation of series -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1.0], "1"),
        ([0.0, 0.0, 0.0], "0+0x2"),
        ([1.0, 3.0, 5.0, 6.0], "1+2x2 6"),
        ([5.0, 4.0, 3.0], "5-1x2"),
        ([None, None, 1.0, 1.5], "_ _x1 1 1.5"),
        ([1.0, None, None, None], "1 stale _x2"),
        ([0.12345, float("nan"), 2e9], "0.123 stale 2000000000"),
    ],
)
def test_values_are_written_as_promtool_reads_them(values: list[float | None], written: str) -> None:
    assert notation(values) == written


def test_promtool_reads_a_document(tmp_path: Path) -> None:
    rules = tmp_path / "alerts.yaml"
    rules.write_text("groups: [{name: g, rules: [{alert: Low, expr: 'x < 5', for: 1m}]}]\n")
    low, high = (Series("x", [9.0, 9.0, value, value]) for value in (4.0, 8.0))
    for series, fires in ((low, ["Low"]), (high, [])):
        file = tmp_path / "test.yaml"
        file.write_text(document("A comment.", [series], fires, hold=6).replace("../../../deploy/prometheus/", ""))
        assert "SUCCESS" in promtool("test", "rules", file)
