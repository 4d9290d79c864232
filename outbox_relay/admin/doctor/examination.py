"""The examination of a database by ``doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from outbox_relay.admin.alive import ALIVE_SECONDS
from outbox_relay.admin.doctor import degradation, log, schedules, server, sinks
from outbox_relay.admin.doctor.finding import Finding, worst_first
from outbox_relay.admin.status import RETENTION, status
from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, RightMissing, StatementFailed
from outbox_relay.postgres.store import Store

T = TypeVar("T")
Check: TypeAlias = Callable[[Sequence[Any]], Iterable[Finding]]
"""A check of the rows of a statement."""
STATEMENT_SECONDS = 5.0
"""Time limit of each statement on the server."""


def _configurations(rows: Sequence[Any]) -> Iterable[Finding]:
    return [*server.examine_configurations(rows), *server.examine_poolers(rows)]


def _minutes(rows: Sequence[Any]) -> Iterable[Finding]:
    return degradation.examine_minutes(*rows[0])


STATEMENTS: Sequence[tuple[str, Mapping[str, Any], Check]] = (
    ("doctor_transactions", {"seconds": server.TRANSACTION_SECONDS}, server.examine_transactions),
    ("doctor_locks", {"seconds": server.LOCK_SECONDS}, server.examine_locks),
    ("doctor_tables", {"dead": server.DEAD_ROWS}, server.examine_tables),
    ("doctor_slots", {"bytes": server.SLOT_BYTES}, server.examine_slots),
    ("doctor_publications", {}, server.examine_publications),
    ("doctor_autovacuum", {"dead": server.LATE_DEAD_ROWS, "seconds": server.LATE_SECONDS}, server.examine_autovacuum),
    ("doctor_topics", {}, sinks.examine_topics),
    ("doctor_schedules", {"seconds": schedules.LATE_SECONDS}, schedules.examine_schedules),
    ("doctor_history", {"seconds": degradation.RECENT_SECONDS}, degradation.examine_history),
    ("doctor_figures", {"seconds": degradation.FIGURES_SECONDS}, degradation.examine_figures),
    ("doctor_minutes", {"seconds": ALIVE_SECONDS}, _minutes),
    ("relay_configs", {"seconds": ALIVE_SECONDS}, _configurations),
    ("foreign_privileges", {}, server.examine_privileges),
    ("doctor_privileges", {}, server.examine_missing_privileges),
    ("row_security", {}, server.examine_row_security),
)
"""(name of the statement, parameters, check)"""


def doctor(store: Store, oldest_seconds: float = sinks.OLDEST_SECONDS) -> list[Finding]:
    """Return the findings, worst first. A part that could not be read is named as unexamined.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable`` if the state of the sinks cannot be read.
    """
    found = _or_failure(lambda: status(store))
    numbering = _rows(store, "doctor_numbering", {})
    findings: list[Finding] = []
    if isinstance(found, StatementFailed):
        findings.append(_not_examined("sinks, relays and replays", str(found)))
    else:
        unanswered = [each for each in found["not_answered"] if each["part"] != RETENTION]  # it is asked again below
        findings += [_not_examined(each["part"], each["reason"]) for each in unanswered]
        findings += _checked("doctor_numbering", numbering, sinks.examine_numbering)
        findings += sinks.examine_relays(found, restored=any(each.id == "rebase-needed" for each in findings))
        oldest = _oldest(store, found, oldest_seconds)
        findings += sinks.examine_sinks(found, oldest_seconds, oldest)
        findings += sinks.examine_replays(found)
    days = _or_failure(lambda: store.retention_status(live=True))
    if isinstance(days, StatementFailed):  # the live query reads the log and can take too long
        days = _or_failure(lambda: store.retention_status(live=False))
    if isinstance(days, StatementFailed):
        findings.append(_not_examined(RETENTION, str(days)))
    else:
        findings += log.examine_retention(days)
        findings += log.examine_growth(days)
    known: Mapping[str, Any] = {} if isinstance(found, StatementFailed) else found
    findings += _examine(store, known.get("in_default_partition") or 0, alive=known.get("relays") != [])
    return worst_first(findings)


def _oldest(store: Store, found: Mapping[str, Any], oldest_seconds: float) -> Mapping[str, Any]:
    """Return the oldest event of each sink that is troubled, as far as the database answers in time."""
    oldest: dict[str, Any] = {}
    for name, sink in found["sinks"].items():
        if sinks.is_troubled(sink, oldest_seconds):
            rows = _rows(store, "doctor_oldest", {"sink": name})
            if not isinstance(rows, RelayError):
                oldest[name] = rows[0]
    return oldest


def _or_failure(ask: Callable[[], T]) -> T | StatementFailed:
    """Return the answer, or the error if only its statement failed: it timed out, or met a lock."""
    try:
        return ask()
    except StatementFailed as error:
        return error


def _examine(store: Store, in_default: int, *, alive: bool) -> list[Finding]:
    """Return the findings on shards, partitions and server. A statement that fails stops no other."""

    def shards(rows: Sequence[Any]) -> Iterable[Finding]:
        return sinks.examine_shards(rows, alive=alive)

    def partitions(rows: Sequence[Any]) -> Iterable[Finding]:
        return log.examine_partitions(in_default, rows[0].ahead)

    def settings(rows: Sequence[Any]) -> Iterable[Finding]:
        return server.examine_server(rows[0], before, time.time())

    before = time.time()
    checks: Sequence[tuple[str, Mapping[str, Any], Check]] = (
        ("doctor_server", {}, settings),
        ("doctor_shards", {"seconds": sinks.UNOWNED_SECONDS, "alive": ALIVE_SECONDS}, shards),
        ("doctor_partitions", {}, partitions),
        *STATEMENTS,
    )
    findings: list[Finding] = []
    for name, parameters, check in checks:
        findings += _checked(name, _rows(store, name, parameters), check)
    return findings


def _rows(store: Store, name: str, parameters: Mapping[str, Any]) -> Sequence[Any] | RelayError:
    """Return the rows of a statement, or its error."""
    try:
        return store.named(name, parameters, STATEMENT_SECONDS)
    except (DatabaseUnusable, DatabaseUnavailable, StatementFailed) as error:
        return error


def _checked(name: str, rows: Sequence[Any] | RelayError, check: Check) -> Iterable[Finding]:
    """Return the findings of a check, or one that says that it was not made."""
    if not isinstance(rows, RelayError):
        return check(rows)
    part, refused = name.removeprefix("doctor_").replace("_", " "), isinstance(rows, DatabaseUnusable)
    reason = "not visible to this role" if isinstance(rows, RightMissing) else str(rows)
    return [_not_examined(part, reason, refused=refused)]


def _not_examined(part: str, reason: str, *, refused: bool = False) -> Finding:
    """Return the finding that a part was not examined, for lack of a right or of time."""
    advice = "run doctor with the relay's role" if refused else "run it again: the server is busy, or a lock is held"
    return Finding("not-examined", "ok", f"not examined: {part}", reason.partition(": run ")[0], advice)
