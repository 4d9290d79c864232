"""The example of a plug-in as an installed package, without an installation."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "nats-sink"


def registered(directory: Path) -> str:
    """Write what an installation writes of the example into `directory`, and return a PYTHONPATH that finds it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    information = directory / "outbox_relay_nats-0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n{name} = {value}\n" for group, each in groups for name, value in each.items()]
    (information / "entry_points.txt").write_text("".join(lines))
    return os.pathsep.join((str(directory), str(EXAMPLE / "src")))
