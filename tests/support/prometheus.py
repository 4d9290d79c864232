"""Prometheus from Debian: a server that scrapes relays, and promtool."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.embedded.server import Server
from tests.support.installed import absent

SCRAPE_SECONDS = 1
CONFIG = """
global:
  scrape_interval: {seconds}s
  evaluation_interval: {seconds}s
rule_files: ["{rules}"]
scrape_configs:
  - job_name: outbox-relay
    static_configs:
      - targets: {targets}
        labels:
          database: {database}
"""


class Prometheus(Server):
    """A server that scrapes the relays at these ports every second and evaluates the given rules."""

    name = "Prometheus"
    start_seconds = 30

    def __init__(self, rules: str, ports: Sequence[int], database: str = "shop") -> None:
        super().__init__("outbox-prometheus-", "prometheus.log")
        self._rules = rules
        self._targets = [f"{LOOPBACK}:{port}" for port in ports]
        self._database = database

    def command(self) -> Sequence[str | Path]:
        """Return the command line of the server."""
        return [
            _program("prometheus"),
            f"--config.file={self.directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address={LOOPBACK}:{self.port}",
        ]

    def prepare(self) -> None:
        """Write the configuration and the rules."""
        rules = self.directory / "rules.yaml"
        rules.write_text(self._rules)
        values = {"seconds": SCRAPE_SECONDS, "rules": rules, "targets": json.dumps(self._targets)}
        (self.directory / "prometheus.yaml").write_text(CONFIG.format(**values, database=self._database))

    def answers(self) -> bool:
        """Return True if the server is ready."""
        try:
            return self._get("/-/ready")[0] == 200
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression with their present values."""
        return self._ask("query", {"query": expression})["result"]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of an expression with their values from ``start`` to ``end``, which are POSIX times."""
        return self._ask("query_range", {"query": expression, "start": start, "end": end, "step": step})["result"]

    def firing(self) -> dict[str, dict[str, Any]]:
        """Return the alerts that fire, by their names; of alerts with several series, one."""
        alerts: list[dict[str, Any]] = self._ask("alerts", {})["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    def _ask(self, path: str, parameters: Mapping[str, str | float]) -> Any:
        status, body = self._get(f"/api/v1/{path}?{urlencode(parameters)}")
        assert status == 200, body
        return json.loads(body)["data"]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def promtool(*arguments: str | Path, stdin: str = "") -> str:
    """Return the output of promtool, which must succeed."""
    command = [_program("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=120, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _program(name: str) -> Path:
    """Return the path of a program. If it is missing, skip the test, or fail it if the variable CI is "true"."""
    found = shutil.which(name)
    if found is None:
        absent(f"Prometheus ({name})", "prometheus")
    return Path(found)
