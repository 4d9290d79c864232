"""The dashboard for Grafana: its panels, and their queries as Grafana sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "deploy/grafana/outbox-relay.json"


class Panel(NamedTuple):
    """A panel with its row, and its queries with their legends."""

    row: str
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def dashboard() -> dict[str, Any]:
    """Return the file."""
    return json.loads(FILE.read_text())


def panels() -> list[Panel]:
    """Return the panels with data, in their order."""
    found: list[Panel] = []
    row = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        queries = tuple((target["expr"], target["legendFormat"]) for target in panel["targets"])
        found.append(Panel(row, panel["title"], panel["fieldConfig"]["defaults"]["unit"], queries))
    return found


def substituted(query: str, *, rate_interval: str, database: str = ".*", sink: str = ".*") -> str:
    """Return a query with values in place of the variables."""
    values = {"$__rate_interval": rate_interval, "$database": database, "$sink": sink}
    for variable, value in values.items():
        query = query.replace(variable, value)
    assert "$" not in query, query
    return query
