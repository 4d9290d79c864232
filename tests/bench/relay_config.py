"""Configuration of the measured relays: defaults, except for addresses and permissions."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence

LEASE_SECONDS = 15
SECRET = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
AT_ONCE = 64
"""Number of concurrent webhook requests, the default of the relay."""
HANDLERS_AT_ONCE = 32
HANDLER_SECONDS = 600
"""Time limit of a handler, which waits until all rows are made."""


def kafka(name: str, topic: str, bootstrap: str) -> str:
    """Return the section of a sink that produces to a topic."""
    return f"""
[sinks.{name}]
type = "kafka"
topic = "{topic}"
start = "beginning"
[sinks.{name}.producer]
"bootstrap.servers" = "{bootstrap}"
"""


def webhook(name: str, url: str) -> str:
    """Return the section of a sink that posts to a receiver on this machine."""
    return f"""
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets = ["{SECRET}"]
start = "beginning"
allow_http = true
allow_networks = ["127.0.0.0/8"]
max_in_flight = {AT_ONCE}
"""


def queue(name: str, handler: str) -> str:
    """Return the section of a sink that makes rows of all events and calls a handler of `handlers` for each."""
    return f"""
[sinks.{name}]
type = "python"
handler = "tests.bench.handlers:{handler}"
claim = "rows"
start = "beginning"
max_in_flight = {HANDLERS_AT_ONCE}
timeout_seconds = {HANDLER_SECONDS}
"""


def config(dsn: str, names: Sequence[str], *sinks: str) -> str:
    """Return the file of a relay that routes every event to each of the sinks."""
    return f"""
[database]
dsn = {json.dumps(dsn)}
[relay]
lease_seconds = {LEASE_SECONDS}
{"".join(sinks)}
[routes]
"*" = {json.dumps(list(names))}
"""
