"""Draw the pictures of docs/observability.md: data of panels of the dashboard, from a real run with a fault.

usage: python -m tests.alerts.pictures [--redraw]

Two relays deliver to a receiver that is down for two of six minutes, and a real Prometheus scrapes them. The queries of
some panels are asked for the whole time. The series are stored in tests/alerts/recorded/outage.json, and the pictures
in docs/images. With --redraw the stored series are drawn again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.alerts.plot import Chart, Line, drawn
from tests.alerts.system import System
from tests.support.panels import panels, substituted
from tests.support.postgres import PostgresServer
from tests.support.prometheus import Prometheus
from tests.support.receiver import Receiver

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final = ROOT / "docs/images"
STORED: Final = Path(__file__).parent / "recorded/outage.json"
RULES: Final = ROOT / "deploy/prometheus/alerts.yaml"
SHOWN: Final[Mapping[str, str]] = {
    "Backlog by sink": "backlog",
    "Oldest undelivered event by sink": "oldest",
    "Deliveries": "deliveries",
    "From emit to acknowledgement": "end-to-end",
    "Circuits": "circuits",
    "Attempts that did not deliver": "failed-attempts",
    "Rows by state": "rows",
    "Ticks": "ticks",
}
"""The panels that are drawn, and the names of their files."""
DATABASE = "shop"
SECONDS, STEP = 360, 5
FAULT = (120.0, 240.0)


def recorded() -> dict[str, Any]:
    """Run the fault, and return the series of the panels."""
    with PostgresServer() as server, System(server, "pictures", 2) as system:
        system.start()
        ports = [relay.port for relay in system.relays.values()]
        with Prometheus(RULES.read_text(), ports, DATABASE) as prometheus:
            began = time.time()
            _wait(began + FAULT[0])
            system.receiver.stop()
            _wait(began + FAULT[1])
            with Receiver(port=system.receiver.port):
                _wait(began + SECONDS)
                charts = {panel.title: _series(prometheus, panel.queries, began) for panel in panels()}
    return {title: {"unit": _units()[title], "lines": charts[title]} for title in SHOWN}


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.time()))


def _units() -> dict[str, str]:
    return {panel.title: panel.unit for panel in panels()}


def _series(prometheus: Prometheus, queries: tuple[tuple[str, str], ...], began: float) -> dict[str, Any]:
    """Return the points of each series of a panel by its legend."""
    found: dict[str, Any] = {}
    for query, legend in queries:
        asked = substituted(query, rate_interval="20s")
        for series in prometheus.query_range(asked, began, began + SECONDS, STEP):
            points = [(round(at - began), float(value)) for at, value in series["values"]]
            found[_legend(legend, series["metric"])] = [
                (at, float(f"{value:.4g}")) for at, value in points if math.isfinite(value)
            ]
    return found


def _legend(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend).strip()


def pictures(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return each picture by the name of its file."""
    found: dict[str, str] = {}
    for title, name in SHOWN.items():
        lines = [Line(_short(legend), points) for legend, points in stored[title]["lines"].items()]
        found[f"{name}.svg"] = drawn(Chart(title, stored[title]["unit"], lines, SECONDS, FAULT))
    return found


def _short(legend: str) -> str:
    """Return a legend without the database, of which there is one."""
    return " ".join(word for word in legend.split() if word != DATABASE)


def main(arguments: list[str]) -> None:
    """Record the series unless told otherwise, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--redraw", action="store_true", help="draw the stored series again")
    if not parser.parse_args(arguments).redraw:
        STORED.write_text(json.dumps(recorded(), separators=(",", ":")) + "\n")
    IMAGES.mkdir(exist_ok=True)
    for name, picture in pictures(json.loads(STORED.read_text())).items():
        (IMAGES / name).write_text(picture)
        sys.stdout.write(f"{IMAGES / name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
