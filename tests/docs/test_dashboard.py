"""The dashboard: the fields that Grafana needs, and queries that Prometheus understands and that use our metrics.

tests/integration/test_prometheus.py asks the queries.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema

from tests.alerts.pictures import IMAGES, SHOWN, STORED, pictures
from tests.docs.pages import text
from tests.docs.test_metrics import listed
from tests.support.panels import dashboard, panels, substituted
from tests.support.prometheus import promtool

ROWS = ["Is anything behind?", "Is it fast?", "What is wrong?", "What does the database say?"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MISSING = object()
UNITS = {"short", "s", "ops", "bytes"}
WIDTH = 24
NOT_IN_SCHEMA = {
    ".id": None,
    ".annotations.list[0].builtIn": 1,
    ".templating.list[1].definition": dashboard()["templating"]["list"][1]["query"]["query"],
    ".templating.list[2].definition": dashboard()["templating"]["list"][2]["query"]["query"],
}
"""Fields that Grafana writes into every dashboard, and that its published schema does not have."""


def test_the_dashboard_has_what_grafana_needs() -> None:
    found = dashboard()
    assert (found["id"], found["uid"], found["title"]) == (None, "outbox-relay", "outbox-relay")
    assert found["schemaVersion"] >= 36
    assert {"annotations", "panels", "refresh", "tags", "templating", "time", "timezone", "version"} <= found.keys()
    assert [panel["title"] for panel in found["panels"] if panel["type"] == "row"] == ROWS
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_published_schema_of_grafana_has_every_field() -> None:
    read = schema.Dashboard.from_json(dashboard())
    assert dict(changes(dashboard(), json.loads(json.dumps(read, cls=JSONEncoder)))) == NOT_IN_SCHEMA


def changes(given: Any, read: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields that Grafana's models left out or read as something else, with their values."""
    if isinstance(given, dict) and isinstance(read, dict):
        fields, others = cast("dict[str, Any]", given), cast("dict[str, Any]", read)
        for name, value in fields.items():
            yield from changes(value, others.get(name, MISSING), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(read, list):
        pairs = itertools.zip_longest(cast("list[Any]", given), cast("list[Any]", read), fillvalue=MISSING)
        for number, (value, other) in enumerate(pairs):
            yield from changes(value, other, f"{path}[{number}]")
    elif given != read:
        yield path, given


def test_each_panel_has_a_source_a_unit_a_description_and_named_queries() -> None:
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["type"] in {"stat", "timeseries", "table"}, panel["title"]
        assert panel["datasource"] == SOURCE, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["options"], panel["title"]
        assert panel["targets"], panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [SOURCE] * len(panel["targets"])
        assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])


def test_no_panels_overlap_and_none_is_wider_than_the_page() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard()["panels"]]
    assert [title for title, at in places if at["x"] + at["w"] > WIDTH] == []
    for (one, a), (other, b) in itertools.combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one, other)


def test_the_variables_are_data_source_database_and_sink() -> None:
    variables = dashboard()["templating"]["list"]
    assert [(each["name"], each["type"]) for each in variables] == [
        ("datasource", "datasource"),
        ("database", "query"),
        ("sink", "query"),
    ]
    for each in variables[1:]:
        assert (each["allValue"], each["includeAll"], each["multi"]) == (".*", True, True)
        assert each["datasource"] == SOURCE
        assert re.fullmatch(rf"label_values\(.+, {each['name']}\)", each["query"]["query"])


def test_the_queries_use_metrics_and_labels_that_exist_and_every_variable(tmp_path: Path) -> None:
    labels = {row.name: row.labels for row in listed()}
    queries = [query for panel in panels() for query, _ in panel.queries]
    for query in queries:
        names = {name.removesuffix("_bucket") for name in re.findall(r"\boutbox_\w+", query)}
        assert names <= labels.keys(), query
        assert 'database=~"$database"' in query, query
        if any("sink" in labels[name] for name in names):
            assert 'sink=~"$sink"' in query, query
    rules = "\n".join(
        f"      - record: q{number}\n        expr: '{substituted(query, rate_interval='1m')}'"
        for number, query in enumerate(queries)
    )
    file = tmp_path / "rules.yaml"
    file.write_text(f"groups:\n  - name: panels\n    rules:\n{rules}\n")
    assert f"{len(queries)} rules found" in promtool("check", "rules", file)


def test_the_pictures_of_the_page_are_drawn_from_the_recorded_series() -> None:
    drawn = pictures(json.loads(STORED.read_text()))
    assert {path.name: path.read_text() for path in IMAGES.glob("*.svg")} == drawn
    shown = re.findall(r"!\[([^]]+)\]\(images/([^)]+)\.svg\)", text("docs/observability.md"))
    assert shown == list(SHOWN.items())
    for name, picture in drawn.items():
        assert picture.count("<polyline") >= 1, name
        assert picture.endswith("</svg>\n")
