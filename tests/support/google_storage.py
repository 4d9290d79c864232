"""A server of Google's storage API with one bucket, and an account that clients find by the usual variable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.ports import LOOPBACK, free_port
from tests.support.wait import until

BUCKET = "events"
CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
"""The variable with the path of the account's file."""


class GoogleStorage:
    """The server at a port. It compares no signatures, so any account may do everything."""

    def __init__(self, port: int) -> None:
        self.options = f"?endpoint_override={LOOPBACK}:{port}&scheme=http&retry_limit_seconds=20"
        """Options of pyarrow that follow an address."""
        self._port = port

    def objects(self, prefix: str = "") -> list[str] | None:
        """Return the names of the objects with a prefix, or None if nothing answers."""
        connection = HTTPConnection(LOOPBACK, self._port, timeout=5)
        try:
            connection.request("GET", f"/storage/v1/b/{BUCKET}/o?prefix={quote(prefix)}")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
        except OSError:
            return None
        finally:
            connection.close()
        return [each["name"] for each in found.get("items", [])]


@contextmanager
def google_storage() -> Generator[GoogleStorage]:
    """Run the server in a process of its own: pyarrow, while it waits for an answer, may let no other thread run."""
    port = free_port()
    storage = GoogleStorage(port)
    place = ["--host", LOOPBACK, "--port", str(port), "--in-memory", "--default-bucket", BUCKET, "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcp_storage_emulator", "start", *place], stdin=subprocess.DEVNULL
    )
    try:
        until(lambda: storage.objects() == [] or process.poll(), seconds=20, what="the storage answers")
        assert process.poll() is None
        yield storage
    finally:
        process.kill()
        process.wait(10)


def write_account(file: Path) -> Path:
    """Write the file of a service account, whose tokens a client signs itself."""
    key = generate_private_key(public_exponent=65_537, key_size=2048)
    account = {
        "type": "service_account",
        "client_email": "relay@example.com",
        "private_key_id": "1",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        "token_uri": f"http://{LOOPBACK}/token",
    }
    file.write_text(json.dumps(account))
    return file
