"""An HTTP server that answers as a schema registry of Confluent, as each test wants it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class RegistryServer(ThreadingHTTPServer):
    """A registry that has the schemas of `schemas` by subject, or answers every request by `status` and `body`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.scheme = "http"
        if tls is not None:
            self.scheme, self.socket = "https", tls.wrap_socket(self.socket, server_side=True)
        self.schemas: dict[str, dict[str, Any]] = {}
        self.status: int | None = None
        """The status of every answer; None: that of a registry."""
        self.body: object = {}
        self.location = ""
        self.pieces: Callable[[], Iterator[bytes]] | None = None
        """Returns the bytes of an answer, instead of one of HTTP."""
        self.logins: list[str | None] = []
        self.paths: list[str] = []
        self.posted: list[Any] = []

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def __enter__(self) -> RegistryServer:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def register(self, subject: str, schema: object, **more: object) -> None:
        """Add a schema, in Avro by default, as version 1 of `subject` with the id 7."""
        found = {"subject": subject, "version": 1, "id": 7, "schema": json.dumps(schema)}
        self.schemas[subject] = {**found, **more}

    def handle_error(self, request: object, client_address: object) -> None:
        """Write nothing: clients that give up close their connections."""

    def answer(self, path: str) -> tuple[int, object]:
        """Return status and body of the answer to a request."""
        if self.status is not None:
            return self.status, self.body
        if path == "/schemas/types":
            return 200, ["AVRO", "JSON", "PROTOBUF"]
        subject = unquote(path.split("/")[2])
        if subject in self.schemas:
            return 200, self.schemas[subject]
        return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}


class _Answer(BaseHTTPRequestHandler):
    server: RegistryServer  # pyright: ignore[reportIncompatibleVariableOverride] - as socketserver documents it
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.logins.append(self.headers.get("authorization"))
        path = urlsplit(self.path).path
        self.server.paths.append(path)
        if self.server.pieces is not None:
            self.close_connection = True
            try:
                for piece in self.server.pieces():
                    self.wfile.write(piece)
            except OSError:
                pass
            return
        status, found = self.server.answer(path)
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if self.server.location:
            self.send_header("location", self.server.location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Write nothing."""
