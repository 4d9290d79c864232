"""The process that writes the archive of one day, reads it back, and reports its hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.outcomes import printable
from outbox_relay.domain.redaction import LONG, may_hold_secret, without
from outbox_relay.postgres.retention import FIRST, DayEvent
from outbox_relay.postgres.store import Store
from outbox_relay.retention.files import Folder, encode, remove
from outbox_relay.retention.wording import day_name

CHUNK_ROWS, CHUNK_BYTES = 1_000, 8 << 20
"""Events, and bytes of payload, that are read at a time."""
PART_EVENTS, PART_BYTES = 1_000_000, 1 << 30
"""Events of one object, and its bytes before compression, after which another one is begun."""
KEYS_MAX = 100_000
"""Number of different keys whose hashes a manifest lists."""
PROBE = b"written by outbox-relay check\n"
NICENESS = 19
"""Priority of the process, the lowest."""


REASON_CHARS = 500
"""Maximum number of characters of a reason."""
_REQUEST = re.compile(r" ?\(Request ID: [^)]*\)")
_SECRET = re.compile(
    r"(?i:\b([\w-]*(?:signature|credential|token|secret|password)[\w-]*=))[^\s&,;]+"
    r"|\b(?:AKIA|ASIA|ya29\.)[\w.-]{12,}"
    r"|(?<![\w+=/])(?=[\w+/]*[a-z])(?=[\w+/]*[A-Z])(?=[\w+/]*[0-9])[\w+/]{40,}=*"
)
"""A parameter that holds a secret, an identifier of a key, or what is as long and as random as a key."""


@dataclass(frozen=True, slots=True)
class Task:
    """The archive to write or to try, or the folders to remove.

    ``dsn`` may contain a password: the task comes through stdin.
    """

    dsn: str
    pooler: bool
    address: str
    form: str
    day: str
    lease: int
    folder: str
    removed: Sequence[str] = ()
    probes: bool = False
    """True to write, read back and remove a small object instead."""


@dataclass(slots=True)
class Part:
    """One object of an archive."""

    name: str
    events: int = 0
    bytes: int = 0
    first_id: int | None = None
    last_id: int | None = None
    sha256: str = ""


@dataclass(slots=True)
class Contents:
    """The events that were read, as far as the manifest describes them."""

    parts: list[Part] = field(default_factory=list[Part])
    hash: Any = field(default_factory=hashlib.sha256)
    keys: set[str] = field(default_factory=set[str])
    keys_complete: bool = True

    def add_key(self, key_hash: str | None) -> None:
        """Record the keyed hash of a key, up to ``KEYS_MAX`` of them."""
        if key_hash is None or key_hash in self.keys:
            return
        self.keys_complete = self.keys_complete and len(self.keys) < KEYS_MAX
        if self.keys_complete:
            self.keys.add(key_hash)

    def manifest(self, task: Task) -> dict[str, Any]:
        """Return the description of the archive, which is written beside it."""
        ids = [part.first_id for part in self.parts] + [part.last_id for part in self.parts]
        known = [each for each in ids if each is not None]
        return {
            "version": 2,
            "day": day_name(task.day),
            "format": task.form,
            "written_at": datetime.now(UTC).isoformat(),
            "events": sum(part.events for part in self.parts),
            "first_id": min(known, default=None),
            "last_id": max(known, default=None),
            "sha256": self.hash.hexdigest(),
            "parts": [asdict(part) for part in self.parts],
            "key_hashes": sorted(self.keys) if self.keys_complete else [],
            "key_hashes_complete": self.keys_complete,
        }


class NotVerified(RelayError):
    """An archive whose content, read back, is not what was written."""


def write_archive(task: Task) -> dict[str, Any]:
    """Write the parts and the manifest of an archive, verify them, and return the manifest.

    Raises ``NotVerified``, ``RelayError`` of the database, and as the file system.
    """
    folder = Folder(task.address, task.folder)
    store = Store(lambda: task.dsn, pooler=task.pooler, connections=1)
    try:
        store.open()
        contents = _write_parts(task, folder, store)
    finally:
        store.close()
    manifest = contents.manifest(task)
    text = json.dumps(manifest, indent=1).encode()
    folder.write("manifest.json", text)
    if folder.read("manifest.json") != text:
        raise NotVerified("the manifest read back differs")
    return manifest


def remove_folders(task: Task) -> list[str]:
    """Remove the folders of a task, and return those that are gone."""
    gone: list[str] = []
    for name in task.removed:
        with suppress(Exception):  # the others can be removed nevertheless
            remove(task.address, name)
            gone.append(name)
    return gone


def probe_folder(task: Task) -> dict[str, str]:
    """Write, read back and remove a small object. Return the step that failed with the reason, or an empty table."""
    step = "write"
    try:
        folder = Folder(task.address, task.folder)
        folder.write("check", PROBE)
        step = "read back"
        found = folder.read("check")
        step = "remove"
        remove(task.address, task.folder)
    except Exception as error:
        if step == "read back":
            remove_folders(replace(task, removed=[task.folder]))
        return {"step": step, "error": reason_of(error, task)}
    return {} if found == PROBE else {"step": "read back", "error": "it has other contents"}


def _write_parts(task: Task, folder: Folder, store: Store) -> Contents:
    contents, chunks = Contents(), _chunks(task, store)
    chunk = next(chunks, None)
    while chunk:
        part = Part(f"part-{len(contents.parts):05}.{task.form}")
        hashed = hashlib.sha256()
        with folder.writing(part.name, task.form) as write:
            while chunk and part.events < PART_EVENTS and part.bytes < PART_BYTES:
                write(chunk)
                _count(chunk, part, hashed, contents)
                chunk = next(chunks, None)
        part.sha256 = hashed.hexdigest()
        verify(folder, part, task.form)
        contents.parts.append(part)
    return contents


def _count(chunk: list[DayEvent], part: Part, hashed: Any, contents: Contents) -> None:
    """Add the events of a chunk to the description of its part."""
    for event in chunk:
        line = encode(event)
        hashed.update(line)
        contents.hash.update(line)
        part.bytes += len(line)
        contents.add_key(event.key_hash)
    part.events += len(chunk)
    part.first_id = chunk[0].id if part.first_id is None else part.first_id
    part.last_id = chunk[-1].id


def _chunks(task: Task, store: Store) -> Iterator[list[DayEvent]]:
    after = (FIRST[0], str(FIRST[1]))
    while chunk := store.read_day(task.day, task.lease, after, CHUNK_ROWS, CHUNK_BYTES):
        yield chunk
        after = (chunk[-1].id, chunk[-1].uid)


def verify(folder: Folder, part: Part, form: str) -> None:
    """Read a part back, and compare count and hash. Raises ``NotVerified``."""
    events, hashed = 0, hashlib.sha256()
    for event in folder.events(part.name, form):
        events += 1
        hashed.update(encode(event))
    if (events, hashed.hexdigest()) != (part.events, part.sha256):
        raise NotVerified(f"{part.name}, read back, has {events} events of {part.events} or other contents")


def main() -> None:
    """Run the task that stdin names, print the manifest's counts or an error as JSON, and end the process."""
    with suppress(OSError):  # a system call filter may forbid it, and the archive does not depend on it
        os.nice(NICENESS)
    os.umask(0o077)
    task = Task(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.write(json.dumps(_answer(task)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for the thread that reads stdin


def _answer(task: Task) -> dict[str, Any]:
    if task.removed:
        return {"removed": remove_folders(task)}
    if task.probes:
        return probe_folder(task)
    try:
        manifest = write_archive(task)
    except Exception as error:
        return {"error": reason_of(error, task)}
    return {name: manifest[name] for name in ("events", "sha256")}


def reason_of(error: Exception, task: Task) -> str:
    """Return why a task failed, without secrets, and alike at each attempt.

    The texts of other errors than the storage's may contain values of events.
    """
    if isinstance(error, RelayError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if not isinstance(error, OSError) and not task.probes:
        return type(error).__name__
    text = _REQUEST.sub("", printable(str(error)).replace(task.folder, "…"))
    return redacted(text)[:REASON_CHARS] or type(error).__name__


def redacted(text: str) -> str:
    """Return ``text`` with an ellipsis for each part of it that is, or may be, a secret."""
    for name, value in os.environ.items():
        if len(value) >= LONG and (may_hold_secret(name.lower()) or name == "AWS_ACCESS_KEY_ID"):
            text = without(text, value, "…", anywhere=True)
    return _SECRET.sub(lambda found: f"{found[1] or ''}…", text)


def _end_with_parent() -> None:
    """End this process when stdin is closed, as it is when the parent ends."""
    while os.read(0, 1):
        pass
    os._exit(1)
