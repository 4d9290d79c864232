"""The checks of ``outbox-relay check --online``: the database, and every sink."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import NamedTuple

from outbox_relay.domain.errors import ConfigurationError, DatabaseUnavailable, DatabaseUnusable, StatementFailed
from outbox_relay.postgres import migrations
from outbox_relay.postgres.listener import WRONG_DATABASE, dsn_identity
from outbox_relay.postgres.shards import missing_positions
from outbox_relay.postgres.store import Store
from outbox_relay.retention.files import without_query
from outbox_relay.service.build import build_archiver, build_store, wakeup_dsn
from outbox_relay.service.clients import Clients
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.settings import KafkaSettings, Settings
from outbox_relay.settings.producer import RUNS_CODE, has_rule
from outbox_relay.sinks.types import BUILTIN

CONNECTIONS = 2
"""Maximum number of database connections of a check."""
HIDDEN = "row level security hides its rows from this role: alter table … disable row level security"
"""The problem of a table that a relay cannot read."""
UNANSWERED = (DatabaseUnavailable, StatementFailed)
"""Errors of a database that may answer later."""


class Findings(NamedTuple):
    """The findings of a check, a line each."""

    problems: list[str]
    unanswered: list[str]
    """The databases that did not answer, which another check may find right."""
    warnings: list[str]


def check_schema(store: Store) -> None:
    """Check that the schema fits this relay, and that its content fits the server.

    Raises ``DatabaseUnusable`` if one of them does not.
    """
    if problem := migrations.fit(*store.schema()):
        raise DatabaseUnusable(problem)
    store.floor()


def unusable_plugins(settings: Settings) -> list[str]:
    """Return a line for each sink that lacks packages or functions, or whose plug-in cannot be made. Opens nothing."""
    problems: list[str] = []
    clients = Clients(settings, tuple)
    for name, sink in settings.sinks.items():
        if sink.type not in BUILTIN or (isinstance(sink, KafkaSettings) and (sink.registry.url or sink.token_provider)):
            try:
                clients.make(name)
            except ConfigurationError as error:
                problems.append(str(error))
    return problems


def missing_for_archive(settings: Settings) -> list[str]:
    """Return a line if days are to be archived and the package that writes archives is not installed."""
    try:
        build_archiver(settings)
    except ConfigurationError as error:
        return [str(error)]
    return []


def refused_values(settings: Settings) -> dict[str, list[str]]:
    """Return a line for each producer setting whose value librdkafka refuses, by the name of its sink.

    No client is made. Settings that name code are left out, since librdkafka would load the library that one names, and
    so are those whose values were checked when the settings were read.
    """
    from outbox_relay.sinks.kafka.settings import value_fault

    found: dict[str, list[str]] = {}
    for name, sink in settings.sinks.items():
        if isinstance(sink, KafkaSettings):
            given = sink.plain_producer.items()
            values = {key: value for key, value in given if key not in RUNS_CODE and not has_rule(key)}
            faults = {key: fault for key, value in values.items() if (fault := value_fault(key, value)) is not None}
            if faults:
                found[name] = [settings.at(("sinks", name, "producer", key), text) for key, text in faults.items()]
    return found


def check_online(settings: Settings) -> Findings:
    """Connect to the database and to every sink, and return what is wrong with them.

    A warning says that the database accepts events which a destination would refuse, or that roles have privileges
    which they do not need.
    """
    findings = Findings([], [], [])
    payload_bytes = _check_database(settings, findings)
    _check_archive(settings, findings)
    own_addresses = OwnAddresses(settings)
    own_addresses.refresh()
    clients = Clients(settings, own_addresses)
    refused = refused_values(settings)
    for name in settings.sinks:
        if name in refused:
            findings.problems.extend(refused[name])
        else:
            _check_sink(name, clients, payload_bytes, findings)
    return findings


@contextmanager
def _reported(findings: Findings, place: str) -> Generator[None]:
    """Turn an error of the database, or of its settings, into a finding."""
    try:
        yield
    except UNANSWERED as error:
        findings.unanswered.append(f"{place}: {error}")
    except (DatabaseUnusable, ConfigurationError) as error:
        findings.problems.append(f"{place}: {error}")


def _check_database(settings: Settings, findings: Findings) -> int | None:
    """Return the largest payload that can be emitted, in bytes, or None if the database does not tell."""
    store = build_store(settings, CONNECTIONS)
    payload_bytes = None
    try:
        with _reported(findings, "database"):
            store.open()
            check_schema(store)
            payload_bytes = store.value("max_payload_bytes")
            with _reported(findings, "database.listen_dsn"):
                dsn = wakeup_dsn(settings) if settings.database.listen_dsn else None
                if dsn is not None and dsn_identity(dsn()) != store.database_identity():
                    findings.problems.append(WRONG_DATABASE)
            missing = store.missing_positions()
            findings.problems.extend(missing_positions(sink, shards) for sink, shards in missing.items())
            known = {row.name for row in store.named("sink_names", {})}
            _check_names(settings, known, store.former_sinks(settings.sinks), findings)
            hidden = [row.name for row in store.named("row_security", {}) if row.hidden]
            findings.problems.extend(f"database: table outbox.{table}: {HIDDEN}" for table in hidden)
            findings.warnings.extend(f"database: {row.said}" for row in store.named("foreign_privileges", {}))
    finally:
        store.close()
    return payload_bytes


def _check_names(settings: Settings, known: Collection[str], former: Collection[str], findings: Findings) -> None:
    """Add a problem for each sink that a relay would not serve, and a warning for one that may have another name.

    ``known`` are the sinks in the database, and ``former`` the names that removed sinks had.
    """
    orphans = sorted(set(known) - set(settings.sinks))
    for name, sink in settings.sinks.items():
        place = ("sinks", name)
        if name in known:
            continue
        if name in former:
            fix = f"take it out, or run outbox-relay sinks remove {name} --forget"
            findings.problems.append(settings.at(place, f"this sink was removed from the database: {fix}"))
        elif orphans:
            begins = "at the beginning of the log" if sink.start == "beginning" else "now"
            text = (
                f"this sink is new and begins {begins}, while {', '.join(orphans)} has no settings any more; if it is "
                f"another name of it, keep the name {orphans[0]}"
            )
            findings.warnings.append(settings.at(place, text))


def _check_archive(settings: Settings, findings: Findings) -> None:
    """Add a problem if the archive does not take or return objects, and a warning if it keeps all of them."""
    try:
        archiver = build_archiver(settings)
    except ConfigurationError:
        return
    if archiver is None or (failed := archiver.check()) is None:
        return
    step, reason = failed
    text = f"retention.archive: {without_query(settings.retention.archive)}: cannot {step} a small object: {reason}"
    (findings.warnings if step == "remove" else findings.problems).append(text)


def _check_sink(name: str, clients: Clients, payload_bytes: int | None, findings: Findings) -> None:
    from outbox_relay.sinks.kafka import KafkaSink

    try:
        sink = clients.make(name)
    except ConfigurationError as error:
        findings.problems.append(str(error))
        return
    try:
        sink.open()
        if problem := sink.check():
            findings.problems.append(f"sinks.{name}: {problem}")
        elif isinstance(sink, KafkaSink) and (warning := sink.online_warning(payload_bytes)):
            findings.warnings.append(f"sinks.{name}: {warning}")
    finally:
        sink.close()
