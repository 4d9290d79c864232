"""The page about plug-ins: its package passes the suite that it explains, and its configuration is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.docs.pages import blocks, text
from tests.support.command import outbox_relay

PAGE = "docs/plugins.md"
SECONDS = 120


def indented(first: str) -> str:
    """Return the indented block of the page that begins with a line."""
    found = [each for each in re.findall(r"(?:^(?: {4}.*)?\n)+", text(PAGE), re.MULTILINE) if each.strip()]
    [block] = [dedent(each).strip("\n") + "\n" for each in found if dedent(each).strip("\n").startswith(first)]
    return block


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the package of the page, as it is installed."""
    sink, suite = (block.text for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "lines_sink.py").write_text(sink)
    (tmp_path / "test_lines.py").write_text(suite)
    project = indented("[project]\n")
    information = tmp_path / "lines_sink-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-sink\nVersion: 1.0\n")
    [(kind, value)] = re.findall(r'^(\w+) = "(\w+:\w+)"$', project, re.MULTILINE)
    (information / "entry_points.txt").write_text(f"[outbox_relay.sinks]\n{kind} = {value}\n")
    return tmp_path


@pytest.mark.slow
def test_the_page_is_true(package: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outbox_relay.sinks.contract"]
    done = subprocess.run(
        [*command, "-W", "ignore::pytest.PytestDeprecationWarning", "test_lines.py"],
        cwd=package,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(package), os.environ.get("PYTHONPATH", "")))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)[0]) >= 25
    assert "-p outbox_relay.sinks.contract" in text(PAGE)


@pytest.mark.slow
def test_the_configuration_of_the_page_is_right(package: Path) -> None:
    config = package / "relay.toml"
    config.write_text('[database]\ndsn = "postgresql://u@localhost/d"\n' + indented("[sinks.audit]\n"))
    ended = outbox_relay("check", "-c", config, PYTHONPATH=str(package))
    assert (ended.code, ended.err, ended.out) == (0, "", "no problem found in 1 sink and 1 route\n")
    ended = outbox_relay("check", "-c", config, PYTHONPATH=str(package), OUTBOX_RELAY_SINKS__AUDIT__MAX_BYTES="0")
    assert ended.code == 2
