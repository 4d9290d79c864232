"""Archives of days, each written by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from outbox_relay.domain.errors import ArchiveFailed, ConfigurationError
from outbox_relay.postgres.store import Store
from outbox_relay.retention.files import without_query
from outbox_relay.retention.wording import day_name
from outbox_relay.retention.worker import Task

ARCHIVE_SECONDS, REMOVE_SECONDS, CHECK_SECONDS = 12 * 3600.0, 600.0, 60.0
"""Time limits of a process that writes the archive of a day, of one that removes objects, and of one that tries it."""
WAIT_SECONDS = 0.25
"""Interval at which the process that waits for one of them renews its lease, or is stopped."""


def archiver_for(address: str, form: str, dsn: Callable[[], str], *, pooler: bool) -> Archiver | None:
    """Return the archiver for the settings, or None without an address.

    Raises ``ConfigurationError`` if pyarrow is not installed.
    """
    if not address:
        return None
    if find_spec("pyarrow") is None:
        raise ConfigurationError("retention.archive: needs pip install 'outbox-relay[archive]'")
    return Archiver(address, form, dsn, pooler=pooler)


class Archiver:
    """Archives days below ``address``, in the format ``form``. ``dsn`` is called for each archive, and may block."""

    def __init__(self, address: str, form: str, dsn: Callable[[], str], *, pooler: bool) -> None:
        self._address = address
        self._form = form
        self._dsn = dsn
        self._pooler = pooler

    def archive(self, store: Store, day: str, lease: int, waiting: Callable[[], None]) -> int:
        """Write, verify and record the archive of a checked day; return the number of its events.

        Objects of earlier archives of the day are removed if they are below this address. The names of those that
        cannot be removed stay in the database. ``waiting`` is called several times a second meanwhile.

        Raises ``ArchiveFailed``, as the store, and as ``waiting``.
        """
        root, folder = without_query(self._address), f"{day_name(day)}-{uuid4().hex}"
        task = Task(self._dsn(), self._pooler, self._address, self._form, day, lease, folder)
        removed = self._remove(task, store.unfinished_archives(day, lease), waiting)
        address = f"{root}/{folder}"
        store.begin_archive(day, lease, address, removed)
        answer = _answer(task, ARCHIVE_SECONDS, waiting)
        if "error" in answer:
            self._remove(task, [address], waiting)
            raise ArchiveFailed(address, answer["error"])
        store.record_archive(day, lease, address, answer["sha256"], answer["events"])
        return answer["events"]

    def check(self) -> tuple[str, str] | None:
        """Write, read back and remove a small object. Return the step that failed, and why, or None."""
        task = Task("", self._pooler, self._address, self._form, "", 0, f"check-{uuid4().hex}", probes=True)
        answer = _answer(task, CHECK_SECONDS)
        return (answer.get("step", "write"), answer["error"]) if "error" in answer else None

    def _remove(self, task: Task, addresses: Sequence[str], waiting: Callable[[], None]) -> list[str]:
        """Remove the objects of those ``addresses`` that are below this one; return the addresses that are gone."""
        root = without_query(self._address)
        folders = [each.removeprefix(f"{root}/") for each in addresses if each.startswith(f"{root}/")]
        if not folders:
            return []
        answer = _answer(replace(task, folder="", removed=folders), REMOVE_SECONDS, waiting)
        return [f"{root}/{folder}" for folder in answer.get("removed", [])]


def _answer(task: Task, seconds: float, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the answer of a new process, or the error for which there is none. It has ended then.

    ``waiting`` is called several times a second. Whatever it raises ends the process.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "outbox_relay.retention"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # nothing is left to be written when it is closed
        )
    except OSError as error:
        return {"error": f"its process failed ({type(error).__name__})"}
    with process:
        try:
            return _ask(process, task, time.monotonic() + seconds, waiting)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {seconds:g} s"}
        except (OSError, ValueError) as error:  # it ended in the middle of its answer
            return {"error": f"its process failed ({type(error).__name__})"}
        finally:
            process.kill()


def _ask(process: subprocess.Popen[bytes], task: Task, until: float, waiting: Callable[[], None]) -> dict[str, Any]:
    """Return the answer of the process, whose stdin stays open until it has ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
    while process.poll() is None:
        waiting()
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_SECONDS)
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, 0.0)
    line = process.stdout.readline()
    return json.loads(line) if line else {"error": f"its process ended with {process.returncode}"}
