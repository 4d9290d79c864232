"""Archives of days, each written by a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from outbox_relay.domain.errors import ArchiveFailed, ConfigurationError
from outbox_relay.domain.file_reading import CONNECTION_FILES
from outbox_relay.postgres.store import Store
from outbox_relay.retention.files import without_query
from outbox_relay.retention.wording import day_name
from outbox_relay.retention.worker import Task

ARCHIVE_SECONDS, REMOVE_SECONDS, CHECK_SECONDS = 12 * 3600.0, 600.0, 60.0
"""Time limits of a process that writes the archive of a day, of one that removes objects, and of one that tries it."""


def archiver_for(address: str, form: str, dsn: Callable[[], str], *, pooler: bool) -> ProcessArchiver | None:
    """Return the archiver for the settings, or None without an address.

    Raises ``ConfigurationError`` if pyarrow is not installed.
    """
    if not address:
        return None
    if find_spec("pyarrow") is None:
        raise ConfigurationError("retention.archive: needs pip install 'outbox-relay[archive]'")
    return ProcessArchiver(address, form, dsn, pooler=pooler)


class ProcessArchiver:
    """Archives days below ``address``, in the format ``form``. ``dsn`` is called for each archive, and may block."""

    def __init__(self, address: str, form: str, dsn: Callable[[], str], *, pooler: bool) -> None:
        self._address = address
        self._form = form
        self._dsn = dsn
        self._pooler = pooler

    async def archive(self, store: Store, day: str, lease: int) -> int:
        """Write, verify and record the archive of a checked day; return the number of its events.

        Objects of earlier archives of the day are removed if they are below this address. The names of those that
        cannot be removed stay in the database.

        Raises ``ArchiveFailed``, and as the store.
        """
        dsn = await CONNECTION_FILES.acall(self._dsn)
        root, folder = without_query(self._address), f"{day_name(day)}-{uuid4().hex}"
        task = Task(dsn, self._pooler, self._address, self._form, day, lease, folder)
        removed = await self._remove(task, await store.unfinished_archives(day, lease))
        address = f"{root}/{folder}"
        await store.begin_archive(day, lease, address, removed)
        try:
            result = await self._run(task, address)
        except ArchiveFailed:
            await self._remove(task, [address])
            raise
        await store.record_archive(day, lease, address, result["sha256"], result["events"])
        return result["events"]

    async def check(self) -> tuple[str, str] | None:
        """Write, read back and remove a small object. Return the step that failed, and why, or None."""
        task = Task("", self._pooler, self._address, self._form, "", 0, f"check-{uuid4().hex}", probes=True)
        try:
            answer = await _answer(task, CHECK_SECONDS)
        except TimeoutError:
            answer = {"error": f"no answer within {CHECK_SECONDS:g} s"}
        except (OSError, ValueError) as error:  # no process could be started, or it ended in the middle of its answer
            answer = {"error": f"its process failed ({type(error).__name__})"}
        return (answer.get("step", "write"), answer["error"]) if "error" in answer else None

    async def _remove(self, task: Task, addresses: Sequence[str]) -> list[str]:
        """Remove the objects of those ``addresses`` that are below this one; return the addresses that are gone."""
        root = without_query(self._address)
        folders = [each.removeprefix(f"{root}/") for each in addresses if each.startswith(f"{root}/")]
        if not folders:
            return []
        with suppress(OSError, ValueError):  # no process could be started, or it ended in the middle of its answer
            answer = await _answer(replace(task, folder="", removed=folders), REMOVE_SECONDS)
            return [f"{root}/{folder}" for folder in answer.get("removed", [])]
        return []

    async def _run(self, task: Task, address: str) -> dict[str, Any]:
        try:
            answer = await _answer(task, ARCHIVE_SECONDS)
        except (OSError, ValueError) as error:  # no process could be started, or it ended in the middle of its answer
            answer = {"error": f"its process failed ({type(error).__name__})"}
        if "error" in answer:
            raise ArchiveFailed(address, answer["error"])
        return answer


async def _answer(task: Task, seconds: float) -> dict[str, Any]:
    """Return the answer of a new process, which has ended then. Raises ``TimeoutError`` after ``seconds``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outbox_relay.retention", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        async with asyncio.timeout(seconds):
            return await _ask(process, task)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ask(process: Process, task: Task) -> dict[str, Any]:
    """Return the answer of the process, whose stdin stays open until it has ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    line = await process.stdout.readline()
    await process.wait()
    return json.loads(line) if line else {"error": f"its process ended with {process.returncode}"}
