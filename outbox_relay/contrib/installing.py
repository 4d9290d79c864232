"""Schema outbox in the migrations of other packages: its state, the script that is missing, and its removal.

Each function takes one that runs a statement over the connection of the migration and returns its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.schema import LOCK_SECONDS, SCHEMA_VERSION, fit, script

Ask: TypeAlias = Callable[[str], Sequence[Sequence[Any]]]

DROP: Final = "drop schema outbox, outbox_internal cascade"
MOST_COUNTED: Final = 1000
"""Maximum number of events of a sink that are counted before the schema is dropped."""
COUNT_SECONDS, ALIVE_SECONDS = 10, 30
"""Time limit of a count, and the time after which a relay that was not seen does not run any more."""

# Without an error if a right is missing: that would end the transaction.
_STATE: Final = """
select c.oid is not null,
       coalesce(has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select'), false)
  from pg_catalog.pg_namespace n
  left join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = 'meta'
 where n.nspname = 'outbox'
"""
_VERSION: Final = "select m.schema_version, m.min_relay from outbox.meta m"
# The script is sent as one message, whose strings are read before the first of its statements has an effect.
_STRINGS: Final = "select pg_catalog.set_config('standard_conforming_strings', 'on', true)"
_ISOLATION: Final = "select current_setting('transaction_isolation')"
_LOCK: Final = f"""
do $$
begin
    perform set_config('lock_timeout', '{LOCK_SECONDS}s', true);
    lock table outbox.event in access exclusive mode;
end
$$
"""
# What else would be lost, and the sentence about it.
_KEPT: Final = (
    ("select exists (select from outbox.inbox)", "the inbox has marks of events that consumers have handled"),
    (
        "select exists (select from outbox.replay r where not r.cleared)",
        "a replay is not done: cancel it, or let it end",
    ),
    ("select exists (select from outbox.delivery)", "there are deliveries that wait or are dead"),
)
_UNREAD: Final = "select not exists (select from outbox.sink) and exists (select from outbox.event)"
_SINKS: Final = f"""
select k.name, p.undelivered, p.deliveries, p.relays
  from outbox.sink k
 cross join lateral outbox.preview_removal(k.name, {MOST_COUNTED}, {COUNT_SECONDS}, {ALIVE_SECONDS}) p
 where k.name < '~' collate "C"
 order by k.name
"""  # noqa: S608 - three numbers


class SchemaState(NamedTuple):
    """The state of schema outbox in a database. Version 0: there is none; None: the role may not read it."""

    version: int | None
    min_relay: int = 0
    is_foreign: bool = False
    """True if another program's schema has the name outbox."""

    @property
    def problem(self) -> str | None:
        """The reason for which this version of outbox-relay cannot work on it, or None."""
        if self.is_foreign:
            return "there is a schema outbox in this database that is not outbox-relay's: rename it or drop it"
        return None if self.version is None else fit(self.version, self.min_relay)


def schema_state(ask: Ask) -> SchemaState:
    """Return the state of schema outbox."""
    if not (rows := ask(_STATE)):
        return SchemaState(0)
    [(is_ours, is_readable)] = rows
    if not is_ours:
        return SchemaState(0, is_foreign=True)
    if not is_readable:
        return SchemaState(None)
    [(version, min_relay)] = ask(_VERSION)
    return SchemaState(version, min_relay)


def missing_script(ask: Ask) -> str | None:
    """Return the script that brings the schema to the version of this package, or None for a newer one.

    The strings of the script are read as the SQL standard has them, until the end of the transaction.

    Raises ``DatabaseUnusable`` for another program's schema, a newer one that needs a newer package, and a role that
    may not read it.
    """
    state = schema_state(ask)
    if state.version is None:
        raise DatabaseUnusable("this role may not read schema outbox: migrate as the owner of the schema")
    if state.is_foreign or (state.version > SCHEMA_VERSION and state.problem):
        raise DatabaseUnusable(f"{state.problem}; nothing was changed")
    if state.version > SCHEMA_VERSION:
        return None
    ask(_STRINGS)
    return script(have=state.version)


def may_drop(ask: Ask) -> bool:
    """Lock the schema against emits and return True if it may be dropped; False if there is none.

    Raises ``DatabaseUnusable`` while a relay runs, an event or a dead letter is not delivered, a replay is not done, or
    the inbox has marks.
    """
    state = schema_state(ask)
    if state.version == 0:
        return False
    if state.version != SCHEMA_VERSION:
        raise DatabaseUnusable(_refusal(f"only its owner can do it, in version {SCHEMA_VERSION} of the schema"))
    if ask(_ISOLATION)[0][0] != "read committed":
        raise DatabaseUnusable(_refusal("it needs the isolation level read committed"))
    ask(_LOCK)
    if ask(_UNREAD)[0][0]:
        raise DatabaseUnusable(_refusal("the log has events, and no relay has registered a sink yet"))
    for sink, undelivered, deliveries, relays in ask(_SINKS):
        if relays:
            raise DatabaseUnusable(_refusal(f"relays serve sink {sink}: {', '.join(relays)}; stop them first"))
        if count := max(undelivered, deliveries):
            raise DatabaseUnusable(_refusal(f"sink {sink} has {count:,} undelivered events or dead letters"))
    for statement, why in _KEPT:
        if ask(statement)[0][0]:
            raise DatabaseUnusable(_refusal(why))
    return True


def _refusal(why: str) -> str:
    return f"schema outbox is not dropped: {why}. Nothing was changed"
