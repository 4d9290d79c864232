"""The suite that every sink must pass, as a plug-in of pytest: see docs/plugins.md.

Its name goes into the variable ``pytest_plugins`` of a `conftest.py`, or into the option ``-p``. A module of tests
extends ``PluginContract`` and has a fixture ``sink_harness`` that returns a ``PluginHarness``. The relay itself imports
nothing of it.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

pytest.register_assert_rewrite(f"{__name__}.handing", f"{__name__}.harness", f"{__name__}.scenarios")

from outbox_relay.sinks import Sink  # noqa: E402 - after the registration
from outbox_relay.sinks.contract.harness import PluginHarness, Received, SinkHarness  # noqa: E402
from outbox_relay.sinks.contract.scenarios import PluginContract, SinkContract  # noqa: E402

__all__ = ["PluginContract", "PluginHarness", "Received", "SinkContract", "SinkHarness", "sink"]


@pytest.fixture
def sink(sink_harness: SinkHarness) -> Generator[Sink]:
    """Return an open sink of the harness."""
    sink = sink_harness.make_sink()
    sink.open()
    yield sink
    sink.close()
    sink_harness.mend_destination()
