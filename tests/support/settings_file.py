"""A file of settings with a sink of each kind."""

from __future__ import annotations

import base64
from pathlib import Path

from outbox_relay.settings import Settings, load

KEY = b"k" * 24
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 64).decode()
DSN = "postgresql://relay@localhost/shop"

FILE = f"""
[database]
dsn = "{DSN}"

[http]
listen = "127.0.0.1:8080"

[sinks.events]
type = "kafka"
topic = "shop.{{type}}"
[sinks.events.producer]
"bootstrap.servers" = "localhost:9092"
"linger.ms" = 5
"socket.keepalive.enable" = true

[sinks.crm]
type = "webhook"
url = "https://crm.example.com/hooks/shop"
secrets = ["{SECRET}", {{secret = "{OTHER}", until = 2027-01-01T00:00:00Z}}]
allow_networks = ["10.1.0.0/16", "fd00::1"]
[sinks.crm.retry]
attempts = 12
jitter = 0.5

[routes]
"order.*" = ["events", "crm"]
"payment.captured" = ["events"]
"""


def load_text(tmp_path: Path, text: str, environ: dict[str, str] | None = None, dsn: str | None = None) -> Settings:
    """Return the settings of a file with this text."""
    path = tmp_path / "relay.toml"
    path.write_text(text)
    return load(path, environ or {}, dsn)
