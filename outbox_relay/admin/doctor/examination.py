"""The examination of a database by ``doctor``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from outbox_relay.admin.alive import ALIVE_SECONDS
from outbox_relay.admin.doctor import log, server, sinks
from outbox_relay.admin.doctor.finding import Finding, worst_first
from outbox_relay.admin.status import status
from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, StatementFailed
from outbox_relay.postgres.store import Store

Check: TypeAlias = Callable[[Sequence[Any]], Iterable[Finding]]
"""A check of the rows of a statement."""
STATEMENT_SECONDS = 5.0
"""Time limit of each statement on the server."""
STATEMENTS: Sequence[tuple[str, Mapping[str, Any], Check]] = (
    ("doctor_transactions", {"seconds": server.TRANSACTION_SECONDS}, server.examine_transactions),
    ("doctor_locks", {"seconds": server.LOCK_SECONDS}, server.examine_locks),
    ("doctor_tables", {"dead": server.DEAD_ROWS}, server.examine_tables),
    ("doctor_slots", {"bytes": server.SLOT_BYTES}, server.examine_slots),
    ("relay_configs", {"seconds": ALIVE_SECONDS}, server.examine_configurations),
    ("foreign_privileges", {}, server.examine_privileges),
)
"""(name of the statement, parameters, check)"""


async def doctor(store: Store, oldest_seconds: float = sinks.OLDEST_SECONDS) -> list[Finding]:
    """Return the findings, worst first. A part of the database that the role may not read is named as unexamined.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable`` if the state of the sinks cannot be read.
    """
    found = await status(store)
    findings = [
        *sinks.examine_relays(found),
        *sinks.examine_sinks(found, oldest_seconds),
        *sinks.examine_replays(found),
        *log.examine_retention(await store.retention_status(live=True)),
    ]
    findings += await _examine(store, found["in_default_partition"])
    return worst_first(findings)


async def _examine(store: Store, in_default: int) -> list[Finding]:
    """Return the findings on partitions and server. A statement that fails stops no other."""

    def partitions(rows: Sequence[Any]) -> Iterable[Finding]:
        return log.examine_partitions(in_default, rows[0].ahead)

    def settings(rows: Sequence[Any]) -> Iterable[Finding]:
        return server.examine_server(rows[0], clock)

    clock = time.time()
    checks: Sequence[tuple[str, Mapping[str, Any], Check]] = (
        ("doctor_server", {}, settings),
        ("doctor_partitions", {}, partitions),
        *STATEMENTS,
    )
    findings: list[Finding] = []
    for name, parameters, check in checks:
        findings += _checked(name, await _rows(store, name, parameters), check)
    return findings


async def _rows(store: Store, name: str, parameters: Mapping[str, Any]) -> Sequence[Any] | RelayError:
    """Return the rows of a statement, or its error."""
    try:
        return await store.named(name, parameters, STATEMENT_SECONDS)
    except (DatabaseUnusable, DatabaseUnavailable, StatementFailed) as error:
        return error


def _checked(name: str, rows: Sequence[Any] | RelayError, check: Check) -> Iterable[Finding]:
    """Return the findings of a check, or one that says that it was not made."""
    if not isinstance(rows, RelayError):
        return check(rows)
    part = name.removeprefix("doctor_").replace("_", " ")
    advice = "run doctor with the relay's role"
    return [Finding("not-examined", "ok", f"not examined: {part}", str(rows).partition(": run ")[0], advice)]
