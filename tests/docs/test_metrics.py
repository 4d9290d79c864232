"""The page about metrics: its table is that of the code, and Prometheus accepts its queries and its configuration."""

from __future__ import annotations

from pathlib import Path

from tests.docs.metrics_table import PAGE, listed
from tests.docs.pages import blocks
from tests.support.metrics import defined
from tests.support.prometheus import promtool


def test_the_page_lists_every_metric_with_its_type() -> None:
    assert {row.name: row.type for row in listed()} == defined()


def test_each_query_uses_its_metric_and_is_one_of_prometheus(tmp_path: Path) -> None:
    assert [row.name for row in listed() if row.name not in row.query] == []
    rules = "\n".join(f"      - record: q{number}\n        expr: {row.query}" for number, row in enumerate(listed()))
    file = tmp_path / "rules.yaml"
    file.write_text(f"groups:\n  - name: page\n    rules:\n{rules}\n")
    assert f"{len(listed())} rules found" in promtool("check", "rules", file)


def test_prometheus_accepts_the_configuration_of_the_page(tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE) if "scrape_configs" in block.text]
    file = tmp_path / "prometheus.yaml"
    file.write_text(block.text)
    assert "SUCCESS" in promtool("check", "config", file)
