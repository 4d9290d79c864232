"""A stream under test, and what it holds."""

# The types of nats-py are partially unknown.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from nats_server import NatsServer
from outbox_relay.sinks import StoredEvent
from outbox_relay.sinks.contract import PluginHarness, Received

STREAM = "SHOP"
TOO_MANY_BYTES = 1_100_000
"""More than the server's `max_payload`, which is a mebibyte."""


async def make_stream(server: NatsServer, *subjects: str) -> None:
    """Replace the stream with an empty one that has these subjects."""
    client = Client()
    await client.connect(server.url)
    streams = client.jsm()
    if STREAM in [info.config.name for info in await streams.streams_info()]:
        await streams.delete_stream(STREAM)
    await streams.add_stream(StreamConfig(name=STREAM, subjects=list(subjects)))
    await client.close()


async def messages(server: NatsServer) -> list[Msg]:
    """Return the messages of the stream, in its order."""
    client = Client()
    await client.connect(server.url)
    count = (await client.jsm().stream_info(STREAM)).state.messages
    found: list[Msg] = []
    if count:
        subscription = await client.jetstream().subscribe(">", stream=STREAM, ordered_consumer=True)
        found = [await subscription.next_msg(10) for _ in range(count)]
    await client.close()
    return found


class NatsHarness(PluginHarness):
    """A stream, on a server that goes down by being killed."""

    type = "nats"

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    def settings(self) -> Mapping[str, object]:
        """Return the table of the sink."""
        return {"server": self._server.url, "stream": STREAM, "subject": "shop.{type}", "timeout_seconds": 5}

    def received(self) -> Sequence[Received]:
        """Return the messages of the stream."""
        return [received(message) for message in asyncio.run(messages(self._server))]

    def break_destination(self) -> None:
        """Kill the server."""
        self._server.kill()

    def mend_destination(self) -> None:
        """Start the server again, with its stream."""
        self._server.start()

    def poison(self, event: StoredEvent) -> StoredEvent:
        """Return an event that is larger than the server accepts."""
        return event._replace(payload=b"x" * TOO_MANY_BYTES)


def received(message: Msg) -> Received:
    """Return a message in the terms of its event."""
    headers = dict(message.headers or {})
    key = headers.get("Outbox-Key")
    return Received(
        None if key is None else unquote(key),
        headers["Outbox-Id"],
        message.data,
        headers["Outbox-Type"],
        headers["Content-Type"],
        headers,
    )
