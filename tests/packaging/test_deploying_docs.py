"""docs/deploying.md: what it shows is held against the image, the relay's settings and the command line."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from ruamel.yaml import YAML

from outbox_relay import settings
from outbox_relay.service.http import Listener
from tests.packaging.compose import ROOT
from tests.support.command import inside
from tests.support.logs import RecordedLog

PAGE = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
UNIT = ROOT / "deploy/systemd/outbox-relay.service"


def block(language: str) -> str:
    """Return the page's only block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


def manifests() -> dict[str, Any]:
    """Kind → manifest."""
    yaml: Any = YAML(typ="safe", pure=True)
    return {document["kind"]: document for document in yaml.load_all(block("yaml"))}


def pod(kind: str) -> dict[str, Any]:
    """Return the pod of a manifest."""
    return manifests()[kind]["spec"]["template"]["spec"]


def relay_settings(tmp_path: Path) -> settings.Settings:
    """Return the settings of the manifest's relay."""
    file = tmp_path / "relay.toml"
    file.write_text(manifests()["ConfigMap"]["data"]["relay.toml"])
    return settings.load(file, {})


def test_the_manifests_agree_with_the_settings(tmp_path: Path) -> None:
    loaded = relay_settings(tmp_path)
    assert settings.warnings(loaded) == []
    (relay,) = pod("Deployment")["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in relay["volumeMounts"]}
    assert str(loaded.database.dsn_file).startswith(mounts["secrets"] + "/")
    assert f"OUTBOX_RELAY_CONFIG={mounts['config']}/relay.toml" in DOCKERFILE
    assert loaded.http.address is not None
    assert [port["containerPort"] for port in relay["ports"]] == [loaded.http.address[1]]
    assert pod("Deployment")["terminationGracePeriodSeconds"] > loaded.relay.stop_after_seconds + 15


@pytest.mark.parametrize("status", [200, 503])
def test_the_image_asks_whether_the_process_is_alive(status: int) -> None:
    """Not whether its database answers, which a restart would not repair."""
    command = re.sub(r"\\\n", "", DOCKERFILE).partition("HEALTHCHECK ")[2].partition("CMD ")[2].splitlines()[0]
    readiness = SimpleNamespace(dead=lambda: None, report=lambda: (status == 200, dict[str, object]()))
    listener = Listener(("::", 0), cast("Any", readiness), CollectorRegistry(), RecordedLog())
    port = listener.server_address[1]
    serving = threading.Thread(target=listener.serve_forever, daemon=True)
    serving.start()

    def code() -> int:
        environment = {**os.environ, "OUTBOX_RELAY_HTTP__LISTEN": f"[::]:{port}"}
        return subprocess.run(json.loads(command), env=environment, timeout=60, check=False).returncode

    assert code() == 0
    listener.close()
    serving.join(10)
    assert code() == 1


def test_the_job_migrates(tmp_path: Path) -> None:
    (container,) = pod("Job")["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    file = tmp_path / "owner-dsn"
    file.write_text("host=127.0.0.1 port=1 dbname=shop")
    variables["OUTBOX_RELAY_DATABASE__DSN_FILE"] = str(file)
    asked = inside(*container["args"], **variables)
    assert asked.code == 1, "which means that only the database is missing"
    assert "127.0.0.1:1" in asked.err


def test_the_unit_runs_the_relay(tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string(block("ini"))
    service = unit["Service"]
    program, *rest = shlex.split(service["ExecStart"])
    assert Path(program).name == "outbox-relay"
    assert rest == ["run"]
    assert f"{Path(program).parent}/pip install 'outbox-relay[relay]'" in PAGE
    assert float(service["TimeoutStopSec"]) > relay_settings(tmp_path).relay.stop_after_seconds + 15
    assert service["RestartPreventExitStatus"] == "2"


def test_the_page_shows_the_unit() -> None:
    assert block("ini") == UNIT.read_text(encoding="utf-8")


def _analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    return program


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = _analyze()
    file = tmp_path / "outbox-relay.service"
    file.write_text(block("ini").replace("/opt/outbox-relay/bin/outbox-relay", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", file],
        capture_output=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        text=True,
        timeout=60,
    )
    assert "outbox-relay.service" not in done.stderr, done.stderr
