"""The command line as people run it: in a process of its own, with stdout and stderr apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed, as JSON."""
        return json.loads(self.out)


def outbox_relay(*arguments: str | Path, stdin: bytes = b"", **environment: str) -> Ended:
    """Run `outbox-relay` with `arguments`; a traceback is an error of the test."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox_relay", *arguments],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "COLUMNS": "120", **environment},
    )
    ended = Ended(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in ended.err, ended.err
    return ended
