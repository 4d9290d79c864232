"""Clients of webhook sinks made from settings, as the relay makes them, and the verdicts of single events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Verdict
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.webhooks import Webhooks
from outbox_relay.settings import Settings, load
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.posting import Client
from tests.support.receiver.signatures import SECRET

PLENTY_SECONDS = 20.0
"""Time limit of a request that should not meet it, however busy the machine is."""
QUICK_SECONDS = 1.0
"""Time limit of a request that is meant to meet it."""
LATE_SECONDS = 5.0
"""Delay after a limit within which a busy machine may notice it."""
LOOPBACK_NETWORKS = ["127.0.0.0/8", "::1/128"]


def settings(url: str, dsn: str = "postgresql://localhost/x", **changes: Any) -> Settings:
    """Return the settings of a relay whose sink ``crm`` may address this machine, with ``changes`` as in the file."""
    return _load(dsn, {"crm": url}, changes)


def _load(dsn: str, urls: Mapping[str, str], changes: Mapping[str, Any]) -> Settings:
    values: dict[str, Any] = {
        "type": "webhook",
        "secrets": [SECRET],
        "allow_http": True,
        "allow_networks": LOOPBACK_NETWORKS,
        "timeout_seconds": PLENTY_SECONDS,
        **changes,
    }
    lines = "\n".join(f"{name} = {toml(value)}" for name, value in values.items())
    sinks = "\n".join(f"[sinks.{name}]\nurl = {toml(url)}\n{lines}" for name, url in urls.items())
    with TemporaryDirectory() as directory:
        path = Path(directory) / "relay.toml"
        path.write_text(f'[database]\ndsn = "{dsn}"\n{sinks}\n[routes]\n"*" = {toml(list(urls))}\n')
        return load(path, {})


def toml(value: Any) -> str:
    """Return ``value`` as TOML."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in pairs.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(each) for each in cast("list[Any]", value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def a_sink(url: str, **changes: Any) -> Client:
    """Return the client of a sink for ``url``, not open."""
    read = settings(url, **changes)
    return Webhooks(read, OwnAddresses(read)).make("crm").client


@asynccontextmanager
async def many(urls: Sequence[str], **changes: Any) -> AsyncGenerator[list[Client]]:
    """Yield the open client of a sink for each URL, all of one relay."""
    named = {f"s{n}": url for n, url in enumerate(urls)}
    read = _load("postgresql://localhost/x", named, changes)
    webhooks = Webhooks(read, OwnAddresses(read))
    sinks = [webhooks.make(name).client for name in named]
    for sink in sinks:
        await sink.open()
    try:
        yield sinks
    finally:
        for sink in sinks:
            await sink.close()


@asynccontextmanager
async def sending(url: str, **changes: Any) -> AsyncGenerator[Client]:
    """Yield the open client of a sink for ``url``."""
    sink = a_sink(url, **changes)
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


async def verdict(sink: Client, event: StoredEvent | None = None) -> Verdict:
    """Return the verdict of one event, which comes never much later than the sink's time limit."""
    began = time.monotonic()
    [found] = await sink.deliver([event or an_event()], soon())
    assert time.monotonic() - began < sink.timeout_seconds + LATE_SECONDS
    return found


async def outcome(url: str, event: StoredEvent | None = None, **changes: Any) -> Verdict:
    """Return the verdict of one event, delivered by a sink of its own."""
    async with sending(url, **changes) as sink:
        return await verdict(sink, event)


def code(found: Verdict) -> str:
    """Return the word for the outcome; empty for a delivery."""
    attempt = getattr(found, "attempt", None)
    return attempt.code if attempt else ""
