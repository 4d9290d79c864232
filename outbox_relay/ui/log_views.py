"""The views of replays, schedules, relays, the database, the audit and doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from outbox_relay import admin
from outbox_relay.admin import replays as admin_replays
from outbox_relay.admin import schedules as admin_schedules
from outbox_relay.admin.status import live_relays
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import RelayError
from outbox_relay.ui import forms, sink_views
from outbox_relay.ui.render import site_of

STATEMENT_SECONDS: Final = 2.0
"""Time limit of each statement of the database page. A part that takes longer says so, and the others are shown."""
TRANSACTION_SECONDS: Final = 5.0
"""Age from which a transaction is shown."""
LOCK_SECONDS: Final = 0.5
"""Wait for a lock from which it is shown."""
AUDIT_ROWS, SCHEDULE_ROWS = 100, 100
"""Number of actions and of schedules on a page."""
PAGE_WAIT_SECONDS, PROGRAM_WAIT_SECONDS = 3.0, 30.0
"""Longest wait of the overview, and of the API, for findings that are not old."""

Values = dict[str, Any]
Fields = Mapping[str, str]


def overview(request: Request, _fields: Fields) -> Values:
    """Return every sink, the live relays, and the findings of ``doctor``."""
    site = site_of(request)
    store = site.store()
    findings = site.findings.read(store, PAGE_WAIT_SECONDS)
    return {**sink_views.sinks(request), "relays": live_relays(store), "doctor": findings}


def doctor(request: Request, _fields: Fields) -> Values:
    """Return the newest findings of ``doctor``."""
    site = site_of(request)
    return site.findings.read(site.store(), PROGRAM_WAIT_SECONDS)


def replays(request: Request, _fields: Fields) -> Values:
    """Return the replays, newest first."""
    return {"replays": admin_replays.replays(site_of(request).store())}


def replay(request: Request, _fields: Fields) -> Values:
    """Return one replay. Raises ``NotFound``."""
    number = forms.read_integer("id", request.path_params["id"], 1, 10**18 - 1)
    return admin_replays.replay(site_of(request).store(), number)


def schedules(request: Request, fields: Fields) -> Values:
    """Return one page of the schedules by name, and the name after which the next one begins."""
    found = admin_schedules.schedules(site_of(request).store(), fields.get("after", ""), SCHEDULE_ROWS + 1)
    shown = found[:SCHEDULE_ROWS]
    return {"schedules": shown, "next": shown[-1]["name"] if len(found) > SCHEDULE_ROWS else None}


def relays(request: Request, _fields: Fields) -> Values:
    """Return the live relays and the deliveries that have been under way for some time."""
    store = site_of(request).store()
    return {"relays": live_relays(store), **admin.running(store, 0.0)}


def database(request: Request, _fields: Fields) -> Values:
    """Return the days of the log, tables, long transactions, lock waits and the four signals of degradation.

    A part that could not be read is None, and ``unread`` says why. ``sees_all`` is True if the transactions of other
    roles are among them.
    """
    store = site_of(request).store()
    unread: dict[str, str] = {}

    def part(name: str, parameters: Mapping[str, Any]) -> Sequence[Values] | None:
        try:
            return [plain(row) for row in store.named(name, parameters, STATEMENT_SECONDS)]
        except RelayError as error:
            unread[name] = str(error)
            return None

    figures, server = sink_views.read_figures(store), part("doctor_server", {})
    try:
        retention = store.retention_status(live=False)
    except RelayError as error:
        retention, unread["retention_status"] = None, str(error)
    return {
        "log_bytes": figures.whole("outbox_log_bytes"),
        "default_partition_rows": figures.whole("outbox_default_partition_rows"),
        "oldest_transaction_seconds": figures.values.get(("outbox_oldest_transaction_seconds", ())),
        "lock_waits": figures.whole("outbox_lock_waits"),
        "figures_age_seconds": figures.age,
        "retention": retention,
        "tables": part("sizes_of_tables", {}),
        "transactions": part("doctor_transactions", {"seconds": TRANSACTION_SECONDS}),
        "sees_all": bool(server and server[0]["sees_all"]),
        "locks": part("doctor_locks", {"seconds": LOCK_SECONDS}),
        "signals": sink_views.history(store, "", "2h"),
        "unread": unread,
    }


def audit(request: Request, fields: Fields) -> Values:
    """Return the newest actions of people and relays."""
    since = forms.read_time("since", fields["since"]) if fields.get("since", "").strip() else None
    return {"audit": admin.audit(site_of(request).store(), since, AUDIT_ROWS)}


def job(request: Request, _fields: Fields) -> Values:
    """Return an action that was asked for, and its progress. Raises ``NotFound``."""
    return site_of(request).jobs.find(request.path_params["id"]).as_dict()
