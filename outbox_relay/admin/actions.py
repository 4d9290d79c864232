"""Manual actions on sinks and events: pause or resume a sink, emit an event."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from uuid import UUID

from outbox_relay import outbox
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.postgres.store import Store


def pause(store: Store, sink: str, *, actor: str | None = None, reason: str | None = None) -> bool:
    """Pause ``sink`` on all relays; return False if it was already paused.

    Every relay stops its deliveries within seconds and settles the events in flight. The sink is paused until
    ``resume``. ``actor`` and ``reason`` are recorded in the audit, and ``status`` shows the reason.

    Raises ``NotFound``, which names the existing sinks, ``ConfigurationError``, ``DatabaseUnusable`` or
    ``DatabaseUnavailable``.
    """
    return _set_paused(store, sink, paused=True, actor=actor, reason=reason)


def resume(store: Store, sink: str, *, actor: str | None = None, reason: str | None = None) -> bool:
    """Resume a paused ``sink`` from its position; return False if it was not paused.

    Raises as ``pause``.
    """
    return _set_paused(store, sink, paused=False, actor=actor, reason=reason)


def _set_paused(store: Store, sink: str, *, paused: bool, actor: str | None, reason: str | None) -> bool:
    parameters = {"sink": sink, "paused": paused, "actor": actor, "reason": reason}
    try:
        [row] = store.call("set_paused", parameters, "operate")
    except NotFound:
        raise NotFound(unknown_sink(store, sink)) from None
    return row.changed


def require_sink(store: Store, sink: str | None) -> int:
    """Return the number of sinks. Raise ``NotFound``, which names the nearest sink, if ``sink`` is the name of none."""
    names = [row.name for row in store.named("sink_names", {})]
    if sink is not None and sink not in names:
        raise NotFound(unknown_sink(store, sink))
    return len(names)


def unknown_sink(store: Store, sink: str) -> str:
    """Return the message for a sink that does not exist: the nearest name, or all names."""
    names = [row.name for row in store.named("sink_names", {})]
    return f"there is no sink {sink!r} in this database; {_meant(sink, names)}"


def _meant(name: str, names: list[str]) -> str:
    if not names:
        return "there is none yet: a relay registers its sinks when it starts"
    if near := get_close_matches(name.lower(), names, 1):
        return f"did you mean {near[0]}?"
    return "there are: " + ", ".join(names)


def emit(
    store: Store,
    event_type: str,
    payload: bytes,
    *,
    key: str | None,
    headers: Mapping[str, str] | None,
    content_type: str,
    uid: UUID | None,
    tenant: str | None = None,
    priority: int | None = None,
    unique_key: str | None = None,
    deliver_at: datetime | timedelta | None = None,
) -> UUID:
    """Emit one event in its own transaction, and return its uid. ``deliver_at`` may be a delay from now.

    Raises ``ConfigurationError`` for an event that the outbox refuses, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    due = _from_now(store, deliver_at) if isinstance(deliver_at, timedelta) else deliver_at
    try:
        with store.transaction() as connection:
            return outbox.emit(
                connection,
                event_type,
                payload,
                key=key,
                headers=headers,
                deliver_at=due,
                uid=uid,
                content_type=content_type,
                tenant=tenant,
                priority=priority,
                unique_key=unique_key,
            )
    except outbox.InvalidEvent as error:
        raise ConfigurationError(str(error)) from None


def _from_now(store: Store, delay: timedelta) -> datetime:
    """Return the database's time after ``delay``. Raises ``ConfigurationError`` if there is no such time."""
    with store.transaction() as connection:
        [(now,)] = (connection.execute("select pg_catalog.now()")).fetchall()
    try:
        return now + delay
    except OverflowError:
        raise ConfigurationError("deliver_at lies outside the years 1 to 9998") from None
