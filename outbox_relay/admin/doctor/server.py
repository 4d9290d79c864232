"""The checks of the server: settings, transactions, locks, tables, slots. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outbox_relay.admin.doctor.finding import Finding, listed
from outbox_relay.admin.text import duration
from outbox_relay.settings.effective import REFUSAL

TRANSACTION_SECONDS = 300.0
"""Age from which a transaction counts as long."""
LONG_TRANSACTION_SECONDS = 3600.0
"""Age from which that is critical: the log's tables bloat, and positions' snapshots grow."""
LOCK_SECONDS = 1.0
"""Wait for a lock that is reported. A statement of a relay ends after 5 s of it."""
DEAD_ROWS = 100_000
"""Dead rows of a table from which they are reported, if they outnumber its live rows."""
LATE_DEAD_ROWS = 10_000
"""Dead rows of a table from which autovacuum should come, if they are also more than twice its own limit."""
LATE_SECONDS = 3600.0
"""Time without a visit from which autovacuum is late."""
SLOT_BYTES = 10 << 30
"""WAL that a replication slot may keep."""
XID_SHARE = 2.0
"""Age of the oldest transaction id as a multiple of ``autovacuum_freeze_max_age`` from which it is reported."""
LAST_XIDS = 1_500_000_000
"""Age from which that is critical: the server stops at two billions."""
CLOCK_SECONDS = 5.0
"""Difference of the clocks that is reported."""


def examine_server(server: Any, before: float, after: float) -> Iterator[Finding]:
    """Yield the findings on settings and ages.

    ``before`` and ``after`` are the times of this machine around the statement, in seconds since the epoch.
    """
    yield from _examine_settings(server)
    yield from _examine_age("transaction ids", server.xid_age, server.freeze_max_age)
    yield from _examine_age("multixact ids", server.mxid_age, server.mxid_freeze_max_age)
    apart = max(before - server.clock, server.clock - after)
    if apart > CLOCK_SECONDS:
        yield Finding(
            "clocks-apart", "warning", "the clocks of this machine and of the database differ",
            f"by {duration(apart)}",
            "synchronize both by NTP. Relays use the database's clock; signatures of webhooks use the relay's",
        )  # fmt: skip
    if not server.sees_all:
        yield Finding(
            "sessions-unseen", "ok", "long transactions of other roles: unknown",
            "sessions of other roles are not visible to this role", "let a superuser grant pg_read_all_stats to it",
            [f"grant pg_read_all_stats to {server.role}"],
        )  # fmt: skip


def _examine_age(ids: str, age: int, freeze_max_age: int) -> Iterator[Finding]:
    """Yield a finding if ids that VACUUM has to freeze are old. Rows that several sessions lock take multixact ids."""
    if age > min(XID_SHARE * freeze_max_age, LAST_XIDS):
        yield Finding(
            "wraparound", "critical" if age > LAST_XIDS else "warning", f"VACUUM does not keep up with {ids}",
            f"age of the oldest: {age}; the server stops at 2,000,000,000",
            "end what holds it back: see the findings on transactions and replication slots; then vacuum as superuser",
            ["vacuum"],
        )  # fmt: skip


def _examine_settings(server: Any) -> Iterator[Finding]:
    """Yield the findings on settings that endanger committed events."""
    off = [name for name in ("fsync", "full_page_writes") if getattr(server, name) == "off"]
    if off:
        yield Finding(
            "durability-off", "critical", "a crash of the server may corrupt or lose what was committed",
            f"off: {listed(off)}", "set them to on in postgresql.conf, and reload the server",
        )  # fmt: skip
    if server.synchronous_commit == "off" or server.uncertain_roles:
        yield Finding(
            "synchronous-commit-off", "warning", "a crash of the server may lose the last transactions",
            f"synchronous_commit is off for {listed(server.uncertain_roles) or 'this role'}",
            "set it to on for the roles that emit; relays need nothing: a lost position repeats events",
        )  # fmt: skip
    if server.autovacuum == "off":
        yield Finding(
            "autovacuum-off", "critical",
            "no autovacuum runs: tables bloat, and the server eventually stops accepting writes",
            "autovacuum is off", "set it to on in postgresql.conf, and reload the server",
        )  # fmt: skip
    if server.seq_cache != 1:
        yield Finding(
            "sequence-cache", "critical", "sessions cache event ids: relays may skip events",
            f"cache of outbox.event_id_seq: {server.seq_cache}",
            "remove the cache as the owner of the schema; then replay what was emitted since it was set",
            ["alter sequence outbox.event_id_seq cache 1"],
        )  # fmt: skip


def examine_transactions(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding on the oldest transactions."""
    if not found:
        return
    critical = found[0].seconds > LONG_TRANSACTION_SECONDS
    yield Finding(
        "long-transaction", "critical" if critical else "warning",
        "long transactions keep VACUUM from removing dead rows anywhere in the database",
        "; ".join(f"{each.who}: {duration(each.seconds)}, {_held_text(each)}" for each in found)
        + f"; dead rows in schema outbox now: {found[0].dead}",
        "let the application commit, or end the transaction",
        [each.ending for each in found],
    )  # fmt: skip


def _held_text(transaction: Any) -> str:
    """Return what a transaction holds back."""
    if transaction.held is None:
        return "holds only its locks"
    return f"keeps what the last {transaction.held} transactions deleted or changed"


def examine_locks(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding on sessions that wait for a lock on the log."""
    if found:
        yield Finding(
            "lock-waits", "warning", "sessions wait for locks on the log",
            "; ".join(
                f"pid {each.pid} (role {each.role_name}) has waited for {duration(each.seconds)} for {each.object}, "
                f"blocked by {', '.join(map(_blocker, each.blockers)) or 'a queue'}"
                for each in found
            ),
            "end what blocks them: a migration, VACUUM FULL, or a session that is idle in a transaction",
            list(dict.fromkeys(statement for each in found for statement in each.endings)),
        )  # fmt: skip


def _blocker(pid: int) -> str:
    return str(pid) if pid else "a prepared transaction"


def examine_tables(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each table with too many dead rows."""
    for table in found:
        last = "never" if table.vacuumed is None else f"{duration(table.vacuumed)} ago"
        yield Finding(
            "dead-tuples", "warning", f"table outbox.{table.name} has more dead rows than live ones",
            f"dead: {table.dead}, live: {table.live}, last vacuum: {last}",
            "end long transactions first; then vacuum the table as its owner, and let autovacuum visit it more often",
            [f"vacuum outbox.{table.name}"],
        )  # fmt: skip


def examine_autovacuum(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield the findings on tables that autovacuum passes by, or does not visit in time."""
    off = [table.name for table in found if not table.enabled]
    if off:
        yield Finding(
            "autovacuum-off", "warning", "autovacuum passes by tables of the schema: their dead rows stay",
            f"autovacuum_enabled is off for {listed(off)}", "reset the parameter as the owner",
            [f"alter table outbox.{name} reset (autovacuum_enabled)" for name in off],
        )  # fmt: skip
    late = [table for table in found if table.enabled]
    if late:
        yield Finding(
            "autovacuum-late", "warning", "autovacuum does not keep up with tables of the schema",
            listed([f"{table.name}: {table.dead} dead rows, last visit: {_visit_text(table)}" for table in late]),
            "vacuum them as their owner; if it returns, raise autovacuum_max_workers or autovacuum_vacuum_cost_limit",
            [f"vacuum outbox.{table.name}" for table in late],
        )  # fmt: skip


def _visit_text(table: Any) -> str:
    return "never" if table.visited is None else f"{duration(table.visited)} ago"


def examine_slots(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each replication slot that keeps much WAL."""
    for slot in found:
        yield Finding(
            "replication-slot", "warning", f"replication slot {slot.name} keeps WAL on the disk",
            f"{slot.bytes >> 20} MiB, {'active' if slot.active else 'not active'}",
            "let its consumer catch up, or drop the slot if the consumer is gone",
            [f"select pg_drop_replication_slot({slot.quoted})"],
        )  # fmt: skip


def examine_publications(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each publication that publishes partitions as tables of their own."""
    for each in found:
        yield Finding(
            "publication-of-partitions", "warning",
            f"publication {each.name} publishes each partition as a table: its subscribers stop at tomorrow's",
            f"it publishes {each.example}" + (", being for all tables" if each.all_tables else ""),
            "publish changes as those of the whole table; then, at each subscriber: alter subscription NAME refresh "
            "publication with (copy_data = false)",
            [
                *(f"alter publication {each.quoted} add table {table}" for table in each.missing),
                f"alter publication {each.quoted} set (publish_via_partition_root = true)",
            ],
        )  # fmt: skip


def examine_privileges(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding on privileges in the schema that no role should have."""
    if found:
        yield Finding(
            "foreign-privileges", "warning", "roles have privileges in the schema that they do not need",
            listed([each.said for each in found]),
            "run outbox-relay migrate --revoke-others as the owner of the schema, unless they are meant",
        )  # fmt: skip


def examine_missing_privileges(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding on roles that lack privileges which migrate granted to them."""
    if found:
        yield Finding(
            "missing-privileges", "critical", "roles lack privileges that outbox-relay migrate granted to them",
            listed([each.said for each in found]), "run outbox-relay migrate as the owner of the schema",
        )  # fmt: skip


def examine_row_security(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding on tables with row level security, which hides rows from relays."""
    if found:
        yield Finding(
            "row-level-security", "critical", "row level security is enabled: relays refuse to read tables of the log",
            f"tables: {listed([each.name for each in found])}",
            "disable it as the owner of the schema",
            [f"alter table outbox.{each.name} disable row level security" for each in found],
        )  # fmt: skip


def examine_configurations(found: Sequence[Any]) -> Iterator[Finding]:
    """Yield the findings on settings of relays: a refused file, different ones, and polling behind a pooler."""
    known = [each for each in found if each.config and "too_large" not in each.config]
    for each in known:
        if refusal := each.config.get(REFUSAL):
            yield Finding(
                "config-reload-failed", "warning", f"relay {each.name} did not apply the file at its last SIGHUP",
                str(refusal), "correct the file and send SIGHUP again, or restart the relay if it says so",
            )  # fmt: skip
    names = sorted({name for each in known for name in each.config if name != REFUSAL})
    settings = [name for name in names if _differs(name, [each.config for each in known])]
    if settings:
        yield Finding(
            "relay-configurations", "warning", "relays run with different settings",
            f"settings: {listed(settings)}; relays: {listed(sorted(each.name for each in known))}",
            "finish the rolling deployment, or give all relays one file",
        )  # fmt: skip
    poolers = [each for each in known if each.config.get("database.pooler") == "transaction"]
    if polling := sorted(each.name for each in poolers if each.config.get("database.listen_dsn") is None):
        yield Finding(
            "pooler-without-listen", "warning", "relays behind a pooler are not woken by new events: they poll",
            f"relays without database.listen_dsn: {listed(polling)}",
            "set database.listen_dsn to a connection string that leads to the server itself",
        )  # fmt: skip


def _differs(name: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if a setting differs. A relay that serves some of the sinks lacks the settings of the others."""
    return len({repr(each.get(name)) for each in configs if name in each or not name.startswith("sinks.")}) > 1
