"""The contract of every sink of the relay itself: see `outbox_relay.sinks.contract`."""

from outbox_relay.sinks.contract import SinkContract

pytest_plugins = ("outbox_relay.sinks.contract",)


class TestSinks(SinkContract):
    """The suite, with each harness of `conftest.py`."""
