"""Actions on sinks: list, remove, seek and probe.

Each is a function of the schema that leaves a row of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from outbox_relay.admin.actions import naming_sinks, unknown_sink
from outbox_relay.admin.thresholds import ALIVE_SECONDS
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import NotFound, StatementFailed
from outbox_relay.postgres.store import Store

EXACT_EVENTS: Final = 10_000
"""Largest number of events that is counted."""
SEARCH_SECONDS: Final = 6.0
"""Time limit for counting events before an action; more are not counted. The server ends a statement after 9 s."""
STEP_ROWS: Final = 1_000
"""Largest number of rows that are deleted in one transaction."""
TRIES: Final = 3
"""Attempts of an action while the configuration changes."""
SERIALIZATION_FAILURE: Final = "40001"
"""The SQLSTATE of an action whose tick is older than the configuration."""


class Removal(NamedTuple):
    """The losses of removing a sink: its rows, its events that are not settled, and the relays that have it."""

    deliveries: int
    undelivered: int
    exact: bool
    relays: list[str]


class Removed(NamedTuple):
    """The result of removing a sink. Neither ``removed`` nor ``forgotten``: it was removed before."""

    removed: bool
    forgotten: bool
    deliveries: int


class Seek(NamedTuple):
    """The events that come again or are passed over, and the dead and the discarded ones behind the new place."""

    again: int
    passed_over: int
    dead: int
    discarded: int
    exact: bool


def sinks(store: Store) -> dict[str, Any]:
    """Return all sinks and the names of removed ones, for ``sinks list --json``.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    found = store.named("list_sinks", {"seconds": ALIVE_SECONDS})
    return {"sinks": [plain(row) for row in found], "former": [plain(row) for row in _former(store)]}


def _former(store: Store) -> Sequence[Any]:
    return store.named("list_former_sinks", {})


def removal(store: Store, sink: str) -> Removal | None:
    """Return what is lost if ``sink`` is removed; None if it was removed before.

    Raises ``NotFound``, which names the nearest sink, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    if any(row.name == sink for row in _former(store)):
        return None
    limits = {"most": EXACT_EVENTS, "seconds": SEARCH_SECONDS, "alive": ALIVE_SECONDS}
    [found] = _act(store, "preview_removal", {"sink": sink, **limits})
    return Removal(*found)


def remove(
    store: Store,
    sink: str,
    *,
    forget: bool,
    actor: str,
    reason: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Removed:
    """Remove ``sink``, or, with ``forget``, the name of a sink that was removed.

    A sink with many rows is paused, and loses them in steps, of which ``progress`` is called with the number of rows
    so far. After an interruption it stays paused; repeat the call.

    Raises as ``removal``.
    """
    audit, deleted = None, 0
    given = {"sink": sink, "forget": forget, "most": STEP_ROWS, "actor": actor, "reason": reason}
    while True:
        [found] = _act(store, "drop_sink", {**given, "audit": audit})
        audit = found.audit if audit is None else audit
        deleted += found.deliveries
        if found.removed or found.forgotten or not found.deliveries:
            return Removed(found.removed, found.forgotten, deleted)
        progress(deleted)


def preview_seek(store: Store, sink: str, to: str) -> Seek:
    """Return what a seek of ``sink`` to ``to`` would do: "now", "beginning", a time, or an age as ISO duration.

    Raises ``ConfigurationError`` for a time that lies in the future; otherwise as ``removal``.
    """
    limits = {"most": EXACT_EVENTS, "seconds": SEARCH_SECONDS}
    [found] = _act(store, "preview_seek", {"sink": sink, "to": to, **limits})
    return Seek(*found)


def seek(store: Store, sink: str, to: str, *, actor: str, reason: str | None = None) -> None:
    """Put ``sink`` at another place of the log. Raises as ``preview_seek``."""
    given = {"sink": sink, "to": to, "actor": actor, "reason": reason}
    again_if_outdated(lambda: _act(store, "seek_sink", given))


def again_if_outdated(act: Callable[[], list[Any]]) -> list[Any]:
    """Return the result of an action, which is tried ``TRIES`` times while the configuration changes."""
    for _ in range(TRIES - 1):
        try:
            return act()
        except StatementFailed as error:
            if error.sqlstate != SERIALIZATION_FAILURE:
                raise
    return act()


def probe_obstacle(store: Store, sink: str) -> str | None:
    """Return why a probe of ``sink`` would do nothing: it is ``paused``, or its circuit is ``closed``. Else None.

    Raises ``NotFound``, which names the nearest sink, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    for row in store.named("status_sinks", {}):
        if row.name == sink:
            return "paused" if row.paused else "closed" if row.circuit == "closed" else None
    raise NotFound(unknown_sink(store, sink))


def probe(store: Store, sink: str, *, actor: str, reason: str | None = None) -> str | None:
    """Have relays whose circuit of ``sink`` is open send its next event now.

    Return why there is nothing to probe, as ``probe_obstacle``. Raises as that, and ``ConfigurationError``.
    """
    with naming_sinks(store, sink):
        [row] = store.call("probe_sink", {"sink": sink, "actor": actor, "reason": reason}, "operate")
    return row.obstacle


def probe_text(sink: str, obstacle: str | None) -> str:
    """Return what a probe of ``sink`` does, or why it does nothing."""
    match obstacle:
        case None:
            return f"relays whose circuit of sink {sink} is open send its next event within two seconds"
        case "paused":
            return f"sink {sink} is paused: nothing is sent to it until it is resumed"
        case _:
            return f"the circuit of sink {sink} is closed: there is nothing to probe"


def _act(store: Store, name: str, parameters: Mapping[str, Any]) -> list[Any]:
    with naming_sinks(store, parameters["sink"]):
        return store.action(name, parameters)
