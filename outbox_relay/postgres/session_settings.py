"""The settings of the server that the relay's statements depend on, with the required values.

A role, a database or a server may have other defaults. A direct connection sets these settings in its startup packet,
which overrides all three. Behind a pooler no setting of a session can be set: there the relay checks them, and
``outbox-relay migrate --role-settings`` stores them as defaults of the role in this database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

SESSION_SETTINGS: Final[Mapping[str, str]] = {
    # The text format of values.
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "client_encoding": "UTF8",
    "bytea_output": "hex",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "extra_float_digits": "1",
    "search_path": "pg_catalog",
    # A policy that hides rows makes a statement fail. Otherwise positions would pass events that the relay cannot see.
    "row_security": "off",
    # Transactions of one statement.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # The server cancels a statement before the client gives up, so that the connection survives.
    "statement_timeout": "9s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "idle_session_timeout": "0",
    # Plans. Functions of the schema that need another value set it themselves.
    "jit": "off",
    "plan_cache_mode": "auto",
    "enable_seqscan": "on",
    "enable_indexscan": "on",
    "enable_indexonlyscan": "on",
    "enable_bitmapscan": "on",
    "enable_sort": "on",
    "enable_nestloop": "on",
    "enable_hashjoin": "on",
    "enable_mergejoin": "on",
}
"""name → value, for every version of PostgreSQL."""
NEWEST_SERVER: Final = 1_000_000
"""A ``server_version_num`` at which every setting exists."""
NEWER_SETTINGS: Final[Mapping[str, tuple[int, str]]] = {"transaction_timeout": (170000, "0")}
"""name → (``server_version_num`` from which it exists, value). An older server refuses a connection that names it."""
CORRECTED_SETTINGS: Final[Mapping[str, str]] = {
    # Otherwise no trigger of the schema fires, and configurations and positions change unnoticed.
    "session_replication_role": "origin",
    # Otherwise the views of the schema cannot be read.
    "restrict_nonsystem_relation_kind": "",
}
"""name → value of settings that a connection changes only if they differ.

Not every role may change the first one, and minor versions of PostgreSQL 15 and 16 introduced the second one."""
CORRECTION: Final[LiteralString] = """
select pg_catalog.set_config(s.name, s.value, false)
  from (values ('session_replication_role', 'origin'), ('restrict_nonsystem_relation_kind', '')) s (name, value)
 where pg_catalog.current_setting(s.name, true) <> s.value
"""
"""The statement that changes them."""

_UTC: Final = frozenset({"utc", "etc/utc", "gmt", "etc/gmt", "uct", "etc/uct", "zulu", "etc/zulu", "universal"})
_MIN_MS: Final[Mapping[str, int]] = {
    "statement_timeout": 9_000,
    "lock_timeout": 5_000,
    "idle_in_transaction_session_timeout": 10_000,
    "idle_session_timeout": 60_000,
    "transaction_timeout": 10_000,
}
"""The smallest accepted timeouts in milliseconds. Longer ones, and 0 for none, are accepted too."""
_EITHER_WAY: Final = frozenset({"jit", "default_transaction_deferrable"})
"""Settings whose other value only costs time."""
_UNITS: Final[Mapping[str, int]] = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class WrongSetting(NamedTuple):
    """A setting of a session with a value that the relay cannot work with, and the required value."""

    name: str
    value: str
    needed: str


def settings_of(server_version: int) -> dict[str, str]:
    """Return the settings that exist on a server of this version (180006 for 18.6)."""
    newer = {name: value for name, (since, value) in NEWER_SETTINGS.items() if server_version >= since}
    return {**SESSION_SETTINGS, **CORRECTED_SETTINGS, **newer}


ENDS_QUERY: Final[Mapping[str, str]] = {
    "57014": "statement_timeout",
    "57P05": "idle_session_timeout",
    "25P04": "transaction_timeout",
}
"""SQLSTATE → the timeout that ended the query for the settings."""


def short_timeout(sqlstate: str | None, seconds: float) -> WrongSetting | None:
    """Return the timeout that is too short if it ended the query for the settings after ``seconds``.

    None if another cause is possible: the database may have been slower than an accepted timeout.
    """
    name = ENDS_QUERY.get(sqlstate or "")
    if name is None or seconds * 1000 >= _MIN_MS[name]:
        return None
    return WrongSetting(name, f"shorter than {max(1, round(seconds * 1000))} ms", settings_of(NEWEST_SERVER)[name])


def startup_options(before: str = "") -> str:
    """Return the connection parameter ``options``: ``before``, then every setting. The last value of a name counts."""
    ours = (f"-c {name}={_escaped(value)}" for name, value in SESSION_SETTINGS.items())
    return " ".join(filter(None, (before.strip(), *ours)))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def wrong_settings(found: Iterable[tuple[str, str | None]]) -> list[WrongSetting]:
    """Return those of ``found`` (name, value as SHOW prints it) that the relay cannot work with.

    A setting without a value does not exist on that server.
    """
    needed = settings_of(max(since for since, _ in NEWER_SETTINGS.values()))
    return [
        WrongSetting(name, value, needed[name])
        for name, value in found
        if value is not None and not _fits(name, value, needed[name])
    ]


def _fits(name: str, value: str, needed: str) -> bool:
    if name in _EITHER_WAY:
        return True
    if name == "search_path":
        return _catalog_first(value)
    if name in _MIN_MS:
        return value == "0" or _milliseconds(value) >= _MIN_MS[name]
    if name == "TimeZone":
        return value.lower() in _UTC
    if name == "extra_float_digits":
        return int(value) >= int(needed)
    if name == "DateStyle":
        return value.partition(",")[0] == needed
    return value == needed


def _milliseconds(value: str) -> int:
    number = value.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(number) * _UNITS.get(value[len(number) :], 1)


def _catalog_first(path: str) -> bool:
    """Return whether the system's functions come first, as they do if the path does not name their schema."""
    schemas = [schema.strip().strip('"') for schema in path.split(",")]
    return "pg_catalog" not in schemas[1:]


def wrong_settings_message(wrong: Sequence[WrongSetting]) -> str:
    """Return the error message for a session behind a pooler, with the fix."""
    each = "; ".join(f"{name} is {value!r} and must be {needed!r}" for name, value, needed in wrong)
    return (
        f"the sessions behind the pooler have settings that the relay cannot work with: {each}: "
        "run outbox-relay migrate --role-settings, which sets them for the relays' roles in this database (or ALTER "
        "ROLE … IN DATABASE … SET …), and let the pooler reconnect"
    )
