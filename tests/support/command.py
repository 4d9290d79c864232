"""The command line as people run it: what it prints, on which stream, and how it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from outbox_relay import cli

SECONDS = 60


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON."""
        return json.loads(self.out)


def outbox_relay(*arguments: str | Path, stdin: bytes = b"", **environment: str) -> Ended:
    """Run `outbox-relay` with `arguments` in a process of its own; a traceback is an error of the test."""
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


def inside(*arguments: str | Path, stdin: bytes = b"", **environment: str) -> Ended:
    """Run the same in this process, which is much quicker; not inside an event loop."""
    out, err, read = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin))
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "stdin", read),
        mock.patch.dict(os.environ, {"COLUMNS": "120", **environment}),
    ):
        code = cli.main([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())
