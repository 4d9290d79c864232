"""The suite of outbox-relay, against a real server."""

import asyncio
from collections.abc import Iterator

import pytest

from nats_harness import NatsHarness, make_stream
from nats_server import NatsServer, require
from outbox_relay.sinks.contract import PluginContract


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    """Return a server for all tests."""
    require()
    server = NatsServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sink_harness(server: NatsServer) -> NatsHarness:
    """Return a harness with an empty stream."""
    server.start()
    asyncio.run(make_stream(server, "shop.>"))
    return NatsHarness(server)


class TestNats(PluginContract):
    """The suite."""
