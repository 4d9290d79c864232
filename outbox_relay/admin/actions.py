"""Manual actions: pause or resume a sink, emit an event."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from uuid import UUID

from outbox_relay import outbox
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.postgres.store import Store


async def pause(store: Store, sink: str) -> bool:
    """Pause ``sink`` on all relays; return False if it was already paused.

    Every relay stops its deliveries within seconds and settles the events in flight. The sink is paused until
    ``resume``.

    Raises ``NotFound``, which names the existing sinks, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    return await _set_paused(store, sink, paused=True)


async def resume(store: Store, sink: str) -> bool:
    """Resume a paused ``sink`` from its position; return False if it was not paused.

    Raises as ``pause``.
    """
    return await _set_paused(store, sink, paused=False)


async def _set_paused(store: Store, sink: str, *, paused: bool) -> bool:
    found = await store.named("set_paused", {"sink": sink, "paused": paused})
    if not found:
        names = [row.name for row in await store.named("sink_names", {})]
        raise NotFound(f"there is no sink {sink!r} in this database; {_meant(sink, names)}")
    return found[0].paused != paused


def _meant(name: str, names: list[str]) -> str:
    if not names:
        return "there is none yet: a relay registers its sinks when it starts"
    if near := get_close_matches(name.lower(), names, 1):
        return f"did you mean {near[0]}?"
    return "there are: " + ", ".join(names)


async def emit(
    store: Store,
    event_type: str,
    payload: bytes,
    *,
    key: str | None,
    headers: Mapping[str, str] | None,
    content_type: str,
    uid: UUID | None,
) -> UUID:
    """Emit one event in its own transaction, and return its uid.

    Raises ``ConfigurationError`` for an event that the outbox refuses, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    try:
        async with store.transaction() as connection:
            return await outbox.aemit(
                connection, event_type, payload, key=key, headers=headers, uid=uid, content_type=content_type
            )
    except outbox.InvalidEvent as error:
        raise ConfigurationError(str(error)) from None
