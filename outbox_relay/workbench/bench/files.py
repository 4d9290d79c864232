"""Reports that were kept, and pictures of them, as files."""

from __future__ import annotations

import json
from pathlib import Path

from outbox_relay.domain.errors import Misconfigured
from outbox_relay.workbench.bench.plot import pictures
from outbox_relay.workbench.bench.report import BenchReport, from_json

REPORT_BYTES = 16 << 20
"""Largest report that is read."""


def read(path: Path) -> BenchReport:
    """A report that `--json` printed. Raises :class:`Misconfigured` when it is none, or cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(REPORT_BYTES)
        return from_json(json.loads(text))
    except OSError as error:
        raise Misconfigured(f"--read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Misconfigured(f"--read {path}: is not JSON") from None
    except Misconfigured as error:
        raise Misconfigured(f"--read {path}: {error}") from None


def draw(report: BenchReport, directory: Path) -> int:
    """Write a picture of each scenario and unit into `directory`, which is made; how many. Raises as above."""
    drawn = pictures(report)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, picture in drawn.items():
            (directory / f"{name}.svg").write_text(picture, encoding="utf-8")
    except OSError as error:
        raise Misconfigured(f"--plot {directory}: {error.strerror}") from None
    return len(drawn)
