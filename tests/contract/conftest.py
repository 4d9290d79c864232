"""The harnesses under the contract; a new sink adds its own here."""

from collections.abc import Generator
from pathlib import Path

import pytest

from outbox_relay.sinks.contract import SinkHarness
from tests.contract.kafka import KafkaHarness, proxied_broker
from tests.contract.memory import MemoryHarness
from tests.contract.python import PythonHarness
from tests.contract.webhook import WebhookHarness
from tests.support.kafka import KafkaBroker
from tests.support.kafka.broker import QUICK_START
from tests.support.proxy import Proxy


@pytest.fixture(scope="session")
def proxied() -> Generator[tuple[KafkaBroker, Proxy]]:
    """Yield a broker behind a proxy."""
    with proxied_broker(java=QUICK_START) as found:
        yield found


@pytest.fixture(
    params=[
        pytest.param("kafka", marks=pytest.mark.kafka),
        "webhook",
        "python, contract",
        "python, acontract",
        "memory, batches",
        "memory, single events",
    ]
)
def sink_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[SinkHarness]:
    """Yield a sink's harness, with its destination up before and after."""
    match request.param:
        case "kafka":
            broker, proxy = request.getfixturevalue("proxied")
            harness = KafkaHarness(broker, proxy, request.getfixturevalue("topic"))
        case "webhook":
            harness = WebhookHarness()
        case "python, contract" | "python, acontract":
            handler = request.param.removeprefix("python, ")
            harness = PythonHarness(tmp_path, handler, request.getfixturevalue("monkeypatch"))
        case name:
            harness = MemoryHarness(keeps_order=name == "memory, batches")
    yield harness
    harness.mend_destination()
    if isinstance(harness, WebhookHarness):
        harness.stop()
