"""Objects of an archive: events as canonical lines or Parquet, and manifests, through the file systems of pyarrow."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from outbox_relay.postgres.retention import DayEvent

READ_BYTES = 1 << 20
"""Bytes that are decompressed at a time."""
BATCH_ROWS = 32
"""Rows of a Parquet file that are in memory at a time, when it is read. A row may have megabytes."""
PAGE_ROWS = 16
"""Rows after which a page of a Parquet file ends if it is large. A page is in memory as a whole."""
GROUP_ROWS = 100_000
"""Rows of a row group. Readers are slow with small ones."""
GROUP_BYTES = 128 << 20
"""Bytes in memory after which a row group is written with fewer rows."""
Write: TypeAlias = Callable[[Sequence[DayEvent]], None]
"""Appends events to an object."""
COLUMNS = tuple(name for name in DayEvent._fields if name not in ("payload", "key_hash"))
"""Columns that are archived as they are, in addition to the payload."""


def without_query(address: str) -> str:
    """Return an address without its options and without a slash at its end."""
    return address.partition("?")[0].rstrip("/")


def remove(address: str, name: str) -> None:
    """Remove the folder ``name`` below ``address`` with everything in it, if it exists.

    Raises ``ValueError`` for a name that is not that of one folder, and as the file system.
    """
    if not re.fullmatch(r"[0-9a-z-]+", name):
        raise ValueError("not the name of a folder of an archive")
    fs, root = _file_system(address)
    with suppress(FileNotFoundError):
        fs.delete_dir(f"{root.rstrip('/')}/{name}")


def encode(event: DayEvent) -> bytes:
    """Return an event as one line of JSON with its end of line.

    A payload that is not UTF-8 is ``payload_base64``. Equal events have equal lines.
    """
    row: dict[str, Any] = {name: getattr(event, name) for name in COLUMNS}
    try:
        row["payload"] = None if event.payload is None else event.payload.decode()
    except UnicodeDecodeError:
        row["payload_base64"] = base64.b64encode(event.payload or b"").decode()
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> DayEvent:
    """Return the event of a line. Raises ``ValueError`` or ``KeyError`` for any other line."""
    row = json.loads(line)
    if "payload_base64" in row:
        payload = base64.b64decode(row["payload_base64"], validate=True)
    else:
        payload = None if row["payload"] is None else row["payload"].encode()
    return DayEvent(*(row[name] for name in COLUMNS), payload=payload, key_hash=None)


def holds_key(address: str, key_hash: str, configured: str) -> bool | None:
    """Return True if the archive at ``address`` holds events of the key with this keyed hash, None if that is unknown.

    ``configured`` is the address of archives in the settings, whose options are used for archives below it. It is not
    known if the manifest cannot be read, or does not list all keys.
    """
    root, _, name = address.rpartition("/")
    options = configured if without_query(configured) == root else root
    try:
        manifest: dict[str, Any] = json.loads(Folder(options, name, existing=True).read("manifest.json"))
    except Exception:  # pyarrow is missing, or its file system failed in one of many ways
        return None
    if not manifest.get("key_hashes_complete"):
        return None
    return key_hash in manifest["key_hashes"]


class Folder:
    """One folder of an archive, at ``name`` below ``address``: a directory, or a prefix of a bucket.

    A directory is made unless it is said to be ``existing``.
    """

    def __init__(self, address: str, name: str, *, existing: bool = False) -> None:
        self._fs, root = _file_system(address)
        self._local = address.startswith("/")
        self._path = f"{root.rstrip('/')}/{name}"
        if self._local and not existing:
            self._fs.create_dir(self._path, recursive=True)

    @contextmanager
    def writing(self, name: str, form: str) -> Generator[Write]:
        """Open an object for events during the block, after which it is durable."""
        with self._stream(name) as stream:
            if form == "parquet":
                with _parquet(stream) as write:
                    yield write
            else:
                with _pyarrow("pyarrow").CompressedOutputStream(stream, "zstd") as compressed:
                    yield lambda events: compressed.write(b"".join(map(encode, events)))
        self._make_durable(name)

    def write(self, name: str, content: bytes) -> None:
        """Write a durable object."""
        with self._stream(name) as stream:
            stream.write(content)
        self._make_durable(name)

    def read(self, name: str) -> bytes:
        """Return the content of a small object."""
        with self._fs.open_input_stream(f"{self._path}/{name}") as stream:
            return bytes(stream.read())

    def events(self, name: str, form: str) -> Iterator[DayEvent]:
        """Yield the events of an object, with bounded memory."""
        path = f"{self._path}/{name}"
        if form == "parquet":
            with self._fs.open_input_file(path) as file:
                # By itself the reader keeps all that it has read.
                parquet = _pyarrow("pyarrow.parquet").ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
                for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                    yield from (_event(row) for row in batch.to_pylist())
        else:
            with self._fs.open_input_stream(path, compression=None) as raw:
                yield from map(decode, _lines(_pyarrow("pyarrow").CompressedInputStream(raw, "zstd")))

    def _stream(self, name: str) -> Any:
        return self._fs.open_output_stream(f"{self._path}/{name}", compression=None)

    def _make_durable(self, name: str) -> None:
        """Write a local file and the directories above it to the disk."""
        if not self._local:
            return
        for path in (Path(self._path) / name, Path(self._path), Path(self._path).parent):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def _parquet(stream: Any) -> Generator[Write]:
    """Write events as Parquet, in groups of rows that fit into memory."""
    arrow = _pyarrow("pyarrow")
    types = {"id": arrow.int64(), "shard": arrow.int16(), "priority": arrow.int16(), "payload": arrow.binary()}
    schema = arrow.schema([(name, types.get(name, arrow.string())) for name in (*COLUMNS, "payload")])
    writer = _pyarrow("pyarrow.parquet").ParquetWriter(stream, schema, compression="zstd", write_batch_size=PAGE_ROWS)
    group: list[Any] = []

    def end_group() -> None:
        if group:
            table = arrow.concat_tables(group)
            group.clear()
            writer.write_table(table, row_group_size=len(table))

    def write(events: Sequence[DayEvent]) -> None:
        rows = [{name: getattr(event, name) for name in schema.names} for event in events]
        group.append(arrow.Table.from_pylist(rows, schema=schema))
        if sum(map(len, group)) >= GROUP_ROWS or sum(each.nbytes for each in group) >= GROUP_BYTES:
            end_group()

    try:
        yield write
        end_group()
    finally:
        writer.close()


def _event(row: dict[str, Any]) -> DayEvent:
    return DayEvent(**row, key_hash=None)


def _lines(stream: Any) -> Iterable[bytes]:
    """Yield the lines of a stream, with their ends."""
    rest = b""
    while block := stream.read(READ_BYTES):
        *lines, rest = (rest + bytes(block)).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        raise ValueError("the last line has no end")


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    fs = _pyarrow("pyarrow.fs")
    if address.startswith("/"):
        return fs.LocalFileSystem(), address
    if not urlsplit(address).query:
        address = without_query(address)
    return fs.FileSystem.from_uri(address)


def _pyarrow(name: str) -> Any:
    return import_module(name)
