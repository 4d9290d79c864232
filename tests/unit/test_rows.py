"""Rows of requests that outlast their event, when the session that made them is ending."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.delivering import RequestDelivering
from outbox_relay.errors import StartAgain
from outbox_relay.gate import Pass
from outbox_relay.ordering import Chunk
from outbox_relay.policy import DELIVERED
from outbox_relay.rows import Rows
from outbox_relay.window import BEGINNING, Position
from tests.contract.harness import an_event


def park(*_: object, **__: object) -> int:
    """The number of the first settlement."""
    return 1


async def test_a_request_that_is_parked_while_the_session_ends_is_cancelled_and_ends_nothing_else() -> None:
    """Goes red when the refusal of a group that is shutting down comes through: it would end the whole relay."""
    log: Any = None
    desk: Any = SimpleNamespace(spec=SimpleNamespace(name="s"), sink=SimpleNamespace(timeout_seconds=15.0), park=park)
    rows = Rows(desk, desk, uuid4(), log)
    desk.overdue = rows.overdue
    async with asyncio.TaskGroup() as rows._tasks:  # pyright: ignore[reportPrivateUsage] - a session that has ended
        pass
    position = Position(BEGINNING)
    request: Any = asyncio.ensure_future(asyncio.sleep(60, DELIVERED))
    with pytest.raises(StartAgain, match="sink s: the session is ending"):
        RequestDelivering(desk)._park_under_way(  # pyright: ignore[reportPrivateUsage]
            Chunk([an_event()], position, position), 0, request, Pass(0, probe=False), 0.0
        )
    await asyncio.wait({request})
    assert request.cancelled()
    assert rows.under_way == 0
