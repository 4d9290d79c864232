"""Saved reports and plots as files."""

from __future__ import annotations

import json
from pathlib import Path

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.workbench.bench.plot import plots
from outbox_relay.workbench.bench.report import BenchReport, from_json

REPORT_BYTES = 16 << 20
"""Size limit of a report file."""


def read(path: Path) -> BenchReport:
    """Read a report saved with `--json`. Raise :class:`ConfigurationError` if the file cannot be read or is not a
    report.
    """
    try:
        with path.open("rb") as file:
            text = file.read(REPORT_BYTES)
        return from_json(json.loads(text))
    except OSError as error:
        raise ConfigurationError(f"--read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigurationError(f"--read {path}: not valid JSON") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"--read {path}: {error}") from None


def draw(report: BenchReport, directory: Path) -> int:
    """Write a plot per scenario and unit into `directory` and return their number.

    Raise :class:`ConfigurationError` if the files cannot be written.
    """
    drawn = plots(report)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, plot in drawn.items():
            (directory / f"{name}.svg").write_text(plot, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--plot {directory}: {error.strerror}") from None
    return len(drawn)
