"""Reads that fail because of what they find: their reasons, and the event that cannot be read at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import StoredEvent

SMALL_PAYLOAD_BYTES = 64 << 10
"""Payload size up to which a payload is never the reason why a read runs out of time or memory."""
TOO_MUCH = {"57014": "it ran out of time", "53200": "it ran out of memory", "54000": "it met a limit of the database"}
"""SQLSTATEs of reads that asked for too much, and their meaning."""
UNLOADABLE = "its answer cannot be loaded"
OVER_LIMIT = ", more than the ceiling"
"""Text that the schema adds after the size of a payload that it did not load."""

Answer: TypeAlias = tuple[list[StoredEvent], int | None]
"""The events of one read, and the last id that it covers; None if it covers all that was asked for."""


def reason_of_failed_read(error: StatementFailed) -> str | None:
    """Return the reason of a failed read if a smaller one may succeed; otherwise None."""
    state = error.sqlstate
    return UNLOADABLE if state is None or state.startswith("22") else TOO_MUCH.get(state)


async def ask_without_payload(
    ask: Callable[[int], Awaitable[Answer]], sink: str, after: int, error: StatementFailed
) -> Answer:
    """Read one event that could not be read, without its payload. ``ask`` is called with the largest payload to load.

    The reason becomes its fault.

    Raises ``StatementFailed`` if that fails too, since the payload is then not the reason.
    """
    reason = reason_of_failed_read(error)
    try:
        events, upto = await ask(0 if reason == UNLOADABLE else SMALL_PAYLOAD_BYTES)
    except StatementFailed as again:
        raise StatementFailed(
            f"sink {sink}: the event behind id {after} cannot be read, with or without its payload: {again}",
            again.sqlstate,
        ) from None
    # The fault names the limit of this read, which is not the ceiling.
    faults = [
        f"reading it failed, {reason}: {event.fault.partition(OVER_LIMIT)[0]}" if event.fault else None
        for event in events
    ]
    return [event._replace(fault=fault) for event, fault in zip(events, faults, strict=True)], upto
