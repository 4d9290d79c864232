"""The examination of a database by ``doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from outbox_relay.admin.doctor import log, server, sinks
from outbox_relay.admin.doctor.finding import Finding, worst_first
from outbox_relay.admin.status import RETENTION, status
from outbox_relay.admin.thresholds import ALIVE_SECONDS, LATE_SECONDS, OLDEST_SECONDS
from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, RightMissing, StatementFailed
from outbox_relay.postgres.store import Store

Rows: TypeAlias = Sequence[Any]
Check: TypeAlias = Callable[[Rows], Iterable[Finding]]
"""A check of the rows of a statement."""
STATEMENT_SECONDS: Final = 5.0
"""Time limit of each statement on the server."""
CHECKS: Final[Sequence[tuple[str, Mapping[str, Any], Check]]] = (
    ("doctor_transactions", {"seconds": server.TRANSACTION_SECONDS}, server.examine_transactions),
    ("doctor_locks", {"seconds": server.LOCK_SECONDS}, server.examine_locks),
    ("doctor_tables", {"dead": server.DEAD_ROWS}, server.examine_tables),
    ("doctor_slots", {"bytes": server.SLOT_BYTES}, server.examine_slots),
    ("doctor_publications", {}, server.examine_publications),
    ("doctor_autovacuum", {"dead": server.LATE_DEAD_ROWS, "seconds": server.LATE_SECONDS}, server.examine_autovacuum),
    ("doctor_topics", {}, sinks.examine_topics),
    ("doctor_schedules", {"seconds": LATE_SECONDS}, sinks.examine_schedules),
    ("relay_configs", {"seconds": ALIVE_SECONDS}, server.examine_configurations),
    ("foreign_privileges", {}, server.examine_privileges),
    ("doctor_privileges", {}, server.examine_missing_privileges),
    ("row_security", {}, server.examine_row_security),
)
"""(name of the statement, parameters, check)"""


def doctor(store: Store, oldest_seconds: float = OLDEST_SECONDS) -> list[Finding]:
    """Return the findings, worst first. A part that could not be read is named as unexamined.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable`` if the state of the sinks cannot be read.
    """
    findings: list[Finding] = []
    known: Mapping[str, Any] = {}
    try:
        known = status(store)
    except StatementFailed as error:
        findings.append(_not_examined("sinks, relays and replays", str(error)))
    if known:
        findings += _examine_status(store, known, oldest_seconds)
    findings += _examine_log(store)
    before = time.time()
    is_alive, in_default = known.get("relays") != [], known.get("in_default_partition") or 0
    checks: Sequence[tuple[str, Mapping[str, Any], Check]] = (
        ("doctor_server", {}, lambda rows: server.examine_server(rows[0], before, time.time())),
        (
            "doctor_shards",
            {"seconds": sinks.UNOWNED_SECONDS, "alive": ALIVE_SECONDS},
            partial(sinks.examine_shards, alive=is_alive),
        ),
        ("doctor_partitions", {}, lambda rows: log.examine_partitions(in_default, rows[0].ahead)),
        *CHECKS,
    )
    for name, parameters, check in checks:
        findings += _checked(store, name, parameters, check)
    return worst_first(findings)


def _examine_status(store: Store, known: Mapping[str, Any], oldest_seconds: float) -> Iterable[Finding]:
    """Return the findings on relays, sinks and replays."""
    unanswered = [each for each in known["not_answered"] if each["part"] != RETENTION]  # which is asked again
    findings = [_not_examined(each["part"], each["reason"]) for each in unanswered]
    numbering = list(_checked(store, "doctor_numbering", {}, sinks.examine_numbering))
    restored = any(each.id == "rebase-needed" for each in numbering)
    findings += [*numbering, *sinks.examine_relays(known, restored=restored)]
    troubled = [name for name, sink in known["sinks"].items() if sinks.is_troubled(sink, oldest_seconds)]
    rows = {name: _rows(store, "doctor_oldest", {"sink": name}) for name in troubled}
    oldest = {name: found[0] for name, found in rows.items() if not isinstance(found, RelayError)}
    return [*findings, *sinks.examine_sinks(known, oldest_seconds, oldest), *sinks.examine_replays(known)]


def _examine_log(store: Store) -> Iterable[Finding]:
    """Return the findings on the days of the log. The live query reads the log and can take too long."""
    for live in (True, False):
        try:
            days = store.retention_status(live=live)
        except StatementFailed as error:
            failure = str(error)
        else:
            return log.examine_retention(days)
    return [_not_examined(RETENTION, failure)]


def _rows(store: Store, name: str, parameters: Mapping[str, Any]) -> Rows | RelayError:
    """Return the rows of a statement, or its error."""
    try:
        return store.named(name, parameters, STATEMENT_SECONDS)
    except (DatabaseUnusable, DatabaseUnavailable, StatementFailed) as error:
        return error


def _checked(store: Store, name: str, parameters: Mapping[str, Any], check: Check) -> Iterable[Finding]:
    """Return the findings of a check, or one that says that it was not made: a failed statement stops no other."""
    rows = _rows(store, name, parameters)
    if not isinstance(rows, RelayError):
        return check(rows)
    part, refused = name.removeprefix("doctor_").replace("_", " "), isinstance(rows, DatabaseUnusable)
    reason = "not visible to this role" if isinstance(rows, RightMissing) else str(rows)
    return [_not_examined(part, reason, refused=refused)]


def _not_examined(part: str, reason: str, *, refused: bool = False) -> Finding:
    """Return the finding that a part was not examined, for lack of a right or of time."""
    advice = "run doctor with the relay's role" if refused else "run it again: the server is busy, or a lock is held"
    return Finding("not-examined", "ok", f"not examined: {part}", reason.partition(": run ")[0], advice)
