"""The content of the pages of replays, schedules, relays, the database and the audit, as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outbox_relay import admin
from outbox_relay.admin import replays as admin_replays
from outbox_relay.admin import schedules as admin_schedules
from outbox_relay.admin.status import live_relays
from outbox_relay.domain.errors import RelayError
from outbox_relay.postgres.store import Store
from outbox_relay.ui import view_sinks
from outbox_relay.ui.figures import read_figures

STATEMENT_SECONDS: Final = 2.0
"""Time limit of each statement of the database page. A part that takes longer says so, and the others are shown."""
TRANSACTION_SECONDS: Final = 5.0
"""Age from which a transaction is shown."""
LOCK_SECONDS: Final = 0.5
"""Wait for a lock from which it is shown."""
AUDIT_ROWS: Final = 100
SCHEDULE_ROWS: Final = 100
"""Number of schedules on a page."""


def replays(store: Store) -> dict[str, Any]:
    """Return the replays, newest first."""
    return {"replays": admin_replays.replays(store)}


def replay(store: Store, number: int) -> dict[str, Any]:
    """Return one replay. Raises ``NotFound``."""
    return admin_replays.replay(store, number)


def schedules(store: Store, after: str) -> dict[str, Any]:
    """Return one page of the schedules by name, from the one after ``after``, and where the next one begins."""
    found = admin_schedules.schedules(store, after, SCHEDULE_ROWS + 1)
    shown = found[:SCHEDULE_ROWS]
    return {"schedules": shown, "next": shown[-1]["name"] if len(found) > SCHEDULE_ROWS else None}


def live(store: Store) -> dict[str, Any]:
    """Return the live relays."""
    return {"relays": live_relays(store)}


def relays(store: Store) -> dict[str, Any]:
    """Return the live relays and the deliveries that have been under way for some time."""
    return {**live(store), **admin.running(store, 0.0)}


def database(store: Store) -> dict[str, Any]:
    """Return the days of the log, tables, long transactions, lock waits and the four signals of degradation.

    A part that could not be read is None, and ``unread`` says why. ``sees_all`` is True if the transactions of other
    roles are among them.
    """
    unread: dict[str, str] = {}

    def part(name: str, parameters: dict[str, Any]) -> Sequence[dict[str, Any]] | None:
        try:
            return [row._asdict() for row in store.named(name, parameters, STATEMENT_SECONDS)]
        except RelayError as error:
            unread[name] = str(error)
            return None

    figures = read_figures(store)
    tables = part("sizes_of_tables", {})
    for table in tables or ():
        table["vacuumed_at"] = table["vacuumed_at"] and table["vacuumed_at"].isoformat()
    transactions = part("doctor_transactions", {"seconds": TRANSACTION_SECONDS})
    server = part("doctor_server", {})
    locks = part("doctor_locks", {"seconds": LOCK_SECONDS})
    try:
        retention = store.retention_status(live=False)
    except RelayError as error:
        retention, unread["retention_status"] = None, str(error)
    return {
        **figures.of_log(),
        "figures_age_seconds": figures.age,
        "retention": retention,
        "tables": tables,
        "transactions": transactions,
        "sees_all": bool(server and server[0]["sees_all"]),
        "locks": locks,
        "signals": view_sinks.history(store, "", "2h"),
        "unread": unread,
    }


def audit(store: Store, since: str | None) -> dict[str, Any]:
    """Return the newest actions."""
    return {"audit": admin.audit(store, since, AUDIT_ROWS)}
