"""The connection of a command, and its small actions: pause or resume a sink, emit an event, read the audit."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, Final
from uuid import UUID

from outbox_relay import outbox
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import ConfigurationError, DatabaseUnusable, NotFound
from outbox_relay.postgres import migrations
from outbox_relay.postgres.errors import advise_grant
from outbox_relay.postgres.store import Store

MOST_NAMED: Final = 20
"""Maximum number of names in an error."""
_DURATION: Final = re.compile(r"PT(\d{1,15})S", re.ASCII)
_UNITS: Final = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


@contextmanager
def connect(dsn: Callable[[], str], *, pooler: bool, check_schema: bool, grant: str = "read") -> Generator[Store]:
    """Open a store on one connection, and close it at the end.

    ``grant`` is the kind of grant that the caller needs, which is named if the role has no right to something.

    Raises ``DatabaseUnusable`` if password, rights or schema are wrong, ``DatabaseUnavailable`` if the database does
    not answer.
    """
    store = Store(dsn, pooler=pooler, connections=1)
    try:
        with advise_grant(grant):
            store.open()
            if check_schema and (problem := migrations.fit(*store.schema())):
                raise DatabaseUnusable(problem)
            yield store
    finally:
        store.close()


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
    with naming_sinks(store, sink):
        [row] = store.call("set_paused", {"sink": sink, "paused": paused, "actor": actor, "reason": reason}, "operate")
    return row.changed


@contextmanager
def naming_sinks(store: Store, *sinks: str | None) -> Generator[None]:
    """Name the nearest sink in the error of the block if one of ``sinks`` does not exist."""
    try:
        yield
    except NotFound:
        for sink in sinks:
            require_sink(store, sink)
        raise


def require_sink(store: Store, sink: str | None) -> int:
    """Return the number of sinks. Raise ``NotFound``, which names the nearest sink, if ``sink`` is the name of none."""
    names = [row.name for row in store.named("sink_names", {})]
    if sink is not None and sink not in names:
        raise NotFound(unknown_sink(store, sink))
    return len(names)


def unknown_sink(store: Store, sink: str) -> str:
    """Return the message for a sink that does not exist: the nearest name, or all names."""
    names = [row.name for row in store.named("sink_names", {})]
    return unknown("sink", sink, names, "there is none yet: a relay registers its sinks when it starts")


def unknown(kind: str, name: str, known: Sequence[str], none: str = "there is none") -> str:
    """Return the message for a sink or a schedule that does not exist: the nearest name, or those that there are."""
    near = get_close_matches(name.lower(), known, 1)
    listed = f"there are: {', '.join(known[:MOST_NAMED])}" if known else none
    return f"there is no {kind} {name!r} in this database; {f'did you mean {near[0]}?' if near else listed}"


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


def audit(store: Store, since: str | None, most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` actions since a time or an age, newest first, for ``audit --json``.

    ``since`` is as ``outbox_internal.past_time`` in the schema reads it; None means all. A time in a filter that was
    an age is shown as a person writes it, such as 2h.

    Raises ``ConfigurationError``, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    rows = store.call("audit", {"since": since, "most": most}, "read")
    names = ("at", "id", "action", "sink", "count", "reason", "actor", "login")
    return [{**plain(row, *names), "role": row.role_name, "filter": _filter(row.filter)} for row in rows]


def _filter(recorded: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a filter with the times that were given as ages, which are recorded as ISO durations, as ages."""
    if recorded is None:
        return None
    durations = {
        name: _DURATION.fullmatch(str(recorded[name])) for name in ("since", "until", "to") if name in recorded
    }
    return {**recorded, **{name: _age(int(found[1])) for name, found in durations.items() if found}}


def _age(seconds: int) -> str:
    unit, size = next((unit, size) for unit, size in _UNITS if seconds % size == 0)
    return f"{seconds // size}{unit}"
