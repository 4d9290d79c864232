"""A plugin of pytest for applications: the fixture ``outbox_events`` asserts what the code under test has emitted.

pytest loads it by itself where outbox-relay is installed. It patches nothing: it asks the database, over the connection
that the code under test uses and in the test's own transaction. docs/testing.md shows every use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outbox_relay.testing.events import EmittedEvent, OutboxEvents

__all__ = ["EmittedEvent", "OutboxEvents", "outbox_events"]


@pytest.fixture
def outbox_events() -> Callable[[Any], OutboxEvents]:
    """Return ``OutboxEvents``, to be called with the connection, session or Django alias of the code under test."""
    return OutboxEvents
