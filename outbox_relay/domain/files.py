"""Small files of this system: their contents, within a time limit, and the authorities that it trusts."""

from __future__ import annotations

import errno
import os
import select
import ssl
import stat
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

READ_SECONDS = 10.0
"""Longest wait for the contents of a file, in seconds."""
AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Red Hat
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, BSD
)
"""The files in which systems keep the certificates of the authorities that they trust."""

_late: dict[Path, Future[bytes]] = {}
"""Reads that did not end in time, so that no file keeps more than one thread."""


def read_file(path: Path, limit: int) -> bytes:
    """Return the contents of the file at ``path``, up to one byte more than ``limit``. Raises OSError.

    The read runs in a thread, so that a pipe without a writer, or a file server that does not answer, is an error
    after ``READ_SECONDS``.
    """
    read = _late.pop(path, None)
    if read is None or read.done():
        read = Future[bytes]()
        try:
            threading.Thread(target=_read, args=(path, limit + 1, read), name="read", daemon=True).start()
        except RuntimeError as error:  # the process can start no thread
            raise OSError(errno.EAGAIN, str(error)) from None
    try:
        return read.result(READ_SECONDS)
    except TimeoutError:
        if read.done():
            return read.result()
        _late[path] = read
        raise OSError(0, _late_reason()) from None


def _read(path: Path, most: int, read: Future[bytes]) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if is_stream(path) else 0))
        try:
            read.set_result(_contents(descriptor, most))
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        read.set_exception(error)


def _contents(descriptor: int, most: int) -> bytes:
    """Return up to ``most`` bytes. Raises OSError for a pipe that is late: another file may take its place."""
    found, until, arrived = bytearray(), time.monotonic() + READ_SECONDS, select.poll()
    arrived.register(descriptor, select.POLLIN)
    while len(found) < most:
        if not arrived.poll(max(0.0, until - time.monotonic()) * 1000):
            raise OSError(0, _late_reason())
        with suppress(BlockingIOError):
            if not (piece := os.read(descriptor, most - len(found))):
                break
            found += piece
    return bytes(found)


def _late_reason() -> str:
    return f"its contents did not arrive within {READ_SECONDS:g} s"


def is_stream(path: Path) -> bool:
    """Return True if ``path`` is a pipe, a socket or a device, for which a library that opens it may wait."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def system_authorities() -> str | None:
    """Return the file with the certificates of trusted authorities, that of ``SSL_CERT_FILE`` first, or None.

    For libraries that look where the machine that built them keeps its own.
    """
    places = (ssl.get_default_verify_paths().cafile, *AUTHORITIES)
    return next((place for place in places if place and Path(place).is_file()), None)
