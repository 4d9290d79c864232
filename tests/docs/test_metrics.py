"""The page about metrics: its table is that of the code, and Prometheus accepts its queries and its configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import blocks, text
from tests.support.metrics import defined
from tests.support.prometheus import promtool

PAGE = "docs/observability.md"
ROW = re.compile(r"^\| `(outbox_\w+)` \| (\w+) \| (\w*) \| ([^|]*) \| (.+?) \| `([^|]+)` \|$", re.MULTILINE)


class Listed(NamedTuple):
    """A row of the page."""

    name: str
    type: str
    unit: str
    labels: tuple[str, ...]
    meaning: str
    query: str


def listed() -> list[Listed]:
    """Return every row of the page's table."""
    rows = [Listed(row[1], row[2], row[3], tuple(re.findall(r"`(\w+)`", row[4])), row[5], row[6]) for row in found()]
    assert len(rows) == len(re.findall(r"^\| `outbox_", text(PAGE), re.MULTILINE)), "a row that is not read"
    return rows


def found() -> list[re.Match[str]]:
    return list(ROW.finditer(text(PAGE)))


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
