"""Python programs in processes forked from one that has imported the large libraries: they start at once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.command import Ended

SECONDS = 60
IMPORTED = (
    "alembic.autogenerate",
    "alembic.config",
    "asyncpg",
    "django.db.models",
    "outbox_relay.contrib.asyncpg",
    "outbox_relay.contrib.sqlalchemy",
    "psycopg",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.orm",
)


def run_text(program: str) -> Ended:
    """Run a program, in which every warning is an error."""
    return _run(_text, program)


def run_module(name: str, words: Sequence[str], directory: Path) -> Ended:
    """Run a module as `python -m name words…` does in a directory."""
    return _run(_module, name, [*words], directory)


def _run(target: Callable[..., None], *arguments: Any) -> Ended:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([*IMPORTED])
    with TemporaryDirectory() as directory:
        out, err = Path(directory) / "stdout", Path(directory) / "stderr"
        process = processes.Process(target=_main, args=(out, err, target, *arguments))
        process.start()
        process.join(SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
            raise AssertionError(f"it did not end within {SECONDS} s: {err.read_text()}")
        return Ended(code, out.read_text(), err.read_text())


def _main(out: Path, err: Path, target: Callable[..., None], *arguments: Any) -> None:
    for path, stream in (out, sys.stdout), (err, sys.stderr):
        with path.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), stream.fileno())
    target(*arguments)


def _text(program: str) -> None:
    warnings.simplefilter("error")
    exec(compile(program, "page", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102 - of a test


def _module(name: str, words: list[str], directory: Path) -> None:
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    sys.argv[1:] = words
    runpy.run_module(name, run_name="__main__", alter_sys=True)
