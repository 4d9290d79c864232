"""The suite of outbox-relay, against a real server."""

from collections.abc import Iterator

import pytest
import pytest_asyncio

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


@pytest_asyncio.fixture
async def sink_harness(server: NatsServer) -> NatsHarness:
    """Return a harness with an empty stream."""
    server.start()
    await make_stream(server, "shop.>")
    return NatsHarness(server)


class TestNats(PluginContract):
    """The suite."""
