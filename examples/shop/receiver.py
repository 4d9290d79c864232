"""Receive webhooks and verify the signature of each request (Standard Webhooks).

WEBHOOK_SECRETS_FILE is a file with one secret per line; RECEIVER_LISTEN is HOST:PORT. The receiver answers 204 to an
accepted request and 401 to one with a wrong signature, and prints a line about each. It runs until SIGTERM.
"""

import base64
import hashlib
import hmac
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOLERANCE_SECONDS = 300
LARGEST_BODY_BYTES = 1 << 20
SLOWEST_REQUEST_SECONDS = 30
REMEMBERED_IDS = 100_000


class Forged(Exception):
    """A request whose signature is wrong or too old."""


def verify(secrets: list[str], headers: Message, body: bytes, now: float) -> str:
    """Return the id of a request that was signed with one of the secrets. Raises Forged otherwise."""
    uid, sent, signatures = (headers.get(f"webhook-{name}") or "" for name in ("id", "timestamp", "signature"))
    if not (sent.isascii() and sent.isdigit() and abs(now - int(sent)) <= TOLERANCE_SECONDS):
        raise Forged("it is too old, or from the future")
    signed = f"{uid}.{sent}.".encode() + body
    for secret in secrets:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        # Compare in constant time: the duration must not reveal how much of a signature was right.
        if any(hmac.compare_digest(expected.encode(), given.encode()) for given in signatures.split()):
            return uid
    raise Forged("its signature is wrong")


class Receiver(BaseHTTPRequestHandler):
    """One request. After a crash an event may be delivered again; the id shows that, and it is not processed again."""

    protocol_version = "HTTP/1.1"
    timeout = SLOWEST_REQUEST_SECONDS
    secrets: list[str]
    seen: OrderedDict[str, None]
    lock = threading.Lock()

    def do_POST(self) -> None:
        """Accept an event once."""
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST_BODY_BYTES:
            self.close_connection = True
            return self._answer(413, "too large, or of no length")
        body = self.rfile.read(int(length))
        try:
            uid = verify(self.secrets, self.headers, body, time.time())
        except Forged as reason:
            return self._answer(401, f"refused: {reason}")
        word = "new" if self._is_new(uid) else "again"
        return self._answer(204, f"{word} {self.headers.get('outbox-type')} {self.headers.get('outbox-key')} {uid}")

    def _is_new(self, uid: str) -> bool:
        with self.lock:
            new = uid not in self.seen
            self.seen[uid] = None
            while len(self.seen) > REMEMBERED_IDS:
                self.seen.popitem(last=False)
            return new

    def _answer(self, status: int, what: str) -> None:
        sys.stdout.write(f"{what}\n")
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Print nothing, because `_answer` has printed a line."""


def serve(host: str, port: int, secrets: list[str]) -> ThreadingHTTPServer:
    """Return a server that listens. The caller lets it serve, and closes it."""
    kind = type("Requests", (Receiver,), {"secrets": secrets, "seen": OrderedDict[str, None]()})
    return ThreadingHTTPServer((host, port), kind)


def close(_number: int, _frame: object) -> None:
    """Exit. The relay sends unanswered requests again."""
    sys.exit()


def main() -> None:
    """Serve until SIGTERM."""
    lines = Path(os.environ["WEBHOOK_SECRETS_FILE"]).read_text(encoding="ascii").splitlines()
    secrets = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    host, _, port = os.environ.get("RECEIVER_LISTEN", "0.0.0.0:8000").rpartition(":")
    signal.signal(signal.SIGTERM, close)
    with serve(host, int(port), secrets) as server:
        sys.stdout.write(f"receiving at port {server.server_port}\n")
        server.serve_forever()


if __name__ == "__main__":
    main()
