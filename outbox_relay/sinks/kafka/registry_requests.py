"""Requests to one address of a schema registry, whose answers are bounded in time and size."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Maximum size of the body of an answer."""
WAIT_SECONDS = 0.05
"""Interval at which a waiting call looks whether it was withdrawn."""


class NoAnswer(Exception):
    """There is no usable answer. The message says why, and has nothing of the answer."""


class RegistryAnswer(NamedTuple):
    """The status and the whole body of an answer."""

    status: int
    body: bytes


class _Http(http.client.HTTPConnection):
    """A connection that another thread may end at any time.

    A client of a library does not allow that: to close a socket under a thread that reads from it could make that
    thread read from another one.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._tls = tls
        self._socket: socket.socket | None = None
        self.ended = False

    def connect(self) -> None:
        """Connect, with TLS if there is a context for it."""
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)
        self._socket = self.sock
        if self.ended:
            self.end()

    def use_timeout(self, seconds: float) -> None:
        """Let each operation of the socket take at most ``seconds``."""
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)

    def end(self) -> None:
        """Make every operation of the socket fail, now and later."""
        self.ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Not that of a TLS socket, which changes what a thread in it uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class RegistryConnection:
    """Sends requests one after another over one connection, opened by the first one and again if it was closed.

    Each runs in a daemon thread, so that a wait always ends, even for the answer of a resolver. ``threads`` limits
    the number of these threads. Redirects are not followed, and proxies not used.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, threads: threading.BoundedSemaphore
    ) -> None:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._headers = {"accept-encoding": "identity", **headers}
        self._http = _Http(parts.hostname or "", parts.port or (443 if is_tls else 80), tls if is_tls else None)
        self._threads = threads

    def ask(self, path: str, body: bytes | None, seconds: float, cancelled: Callable[[], bool]) -> RegistryAnswer:
        """Return the answer to a GET, or to a POST with ``body``. Raise ``NoAnswer``, which ends the connection."""
        if not self._threads.acquire(blocking=False):
            raise NoAnswer("earlier requests have not ended")
        running = Future[RegistryAnswer]()
        seconds = max(seconds, 0.001)
        thread = threading.Thread(
            target=self._run, args=(running, path, body, seconds), name="schema registry", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._threads.release()
            raise NoAnswer("no thread can be started") from None
        try:
            return _result(running, seconds, cancelled)
        except Exception as error:
            self._http.end()
            if running.done():
                self._http.close()
            raise NoAnswer(_reason(error)) from None

    def close(self) -> None:
        """Close the connection. No request may run."""
        self._http.close()

    def _run(self, running: Future[RegistryAnswer], path: str, body: bytes | None, seconds: float) -> None:
        try:
            try:
                running.set_result(self._answer(path, body, seconds))
            except BaseException as error:
                running.set_exception(error)
            if self._http.ended or running.exception() is not None:
                self._http.close()
        finally:
            self._threads.release()

    def _answer(self, path: str, body: bytes | None, seconds: float) -> RegistryAnswer:
        self._http.use_timeout(seconds)
        self._http.request("GET" if body is None else "POST", self._path + path, body, self._headers)
        with self._http.getresponse() as response:
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise NoAnswer(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
            return RegistryAnswer(response.status, content)


def _result(running: Future[RegistryAnswer], seconds: float, cancelled: Callable[[], bool]) -> RegistryAnswer:
    """Return the result. Raise TimeoutError after ``seconds``, or when the caller is withdrawn."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = deadline - time.monotonic()
        try:
            return running.result(max(min(remaining, WAIT_SECONDS), 0.0))
        except TimeoutError:
            if running.done() or remaining <= 0 or cancelled():
                raise


def _reason(error: BaseException) -> str:
    """Return a reason without anything of the answer, which messages of HTTP's errors quote."""
    match error:
        case NoAnswer():
            return str(error)
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError():
            return f"its certificate is not accepted: {error.verify_message}"
        case ssl.SSLError():
            return f"no answer: TLS failed ({(error.reason or 'unknown').lower().replace('_', ' ')})"
        case OSError() if error.strerror:
            return f"no answer: {error.strerror}"
        case _:
            return f"no answer ({type(error).__name__})"
