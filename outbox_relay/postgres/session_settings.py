"""The settings of the server that the relay's statements depend on, with the required values.

A role, a database or a server may have other defaults. A direct connection sets these settings in its startup packet,
which overrides all three. Behind a pooler no setting of a session can be set: there the relay checks them, and
``outbox-relay migrate --role-settings`` stores them as defaults of the role in this database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, LiteralString

SESSION_SETTINGS: Final[Mapping[str, str]] = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "client_encoding": "UTF8",
    "search_path": "pg_catalog",
    # A policy that hides rows makes a statement fail. Otherwise positions would pass events that the relay cannot see.
    "row_security": "off",
    # Transactions of one statement.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # The server cancels a statement before the client gives up, so that the connection survives.
    "statement_timeout": "9s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "idle_session_timeout": "0",
    "jit": "off",
}
"""name → value of the settings in the startup packet, for every version of PostgreSQL."""
CHECKED_SETTINGS: Final[Mapping[str, str]] = {
    **{name: value for name, value in SESSION_SETTINGS.items() if name != "jit"},  # which only costs time
    "transaction_timeout": "0",  # from version 17 on
    # Otherwise no trigger of the schema fires, and configurations and positions change unnoticed.
    "session_replication_role": "origin",
}
"""name → value of the settings that are checked behind a pooler."""
CORRECTION: Final[LiteralString] = """
select pg_catalog.set_config('session_replication_role', 'origin', false)
 where pg_catalog.current_setting('session_replication_role') <> 'origin'
"""
"""The statement that sets what the startup packet cannot, if it differs: not every role may change it."""

_UTC: Final = frozenset({"utc", "etc/utc", "gmt", "etc/gmt", "uct", "etc/uct", "zulu", "etc/zulu", "universal"})
_MIN_SECONDS: Final[Mapping[str, int]] = {
    "statement_timeout": 9,
    "lock_timeout": 5,
    "idle_in_transaction_session_timeout": 10,
    "idle_session_timeout": 60,
    "transaction_timeout": 10,
}
"""The smallest accepted timeouts. Longer ones, and 0 for none, are accepted too."""
_UNITS: Final[Mapping[str, float]] = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}


def startup_options(before: str = "") -> str:
    """Return the connection parameter ``options``: ``before``, then every setting. The last value of a name counts."""
    ours = ("-c {}={}".format(name, value.replace(" ", "\\ ")) for name, value in SESSION_SETTINGS.items())
    return " ".join(filter(None, (before.strip(), *ours)))


def wrong_settings(settings: Iterable[tuple[str, str | None]]) -> str | None:
    """Return an error message, with the fix, for values as SHOW prints them that the relay cannot work with, or None.

    A setting without a value does not exist on that server.
    """
    wrong = "; ".join(
        f"{name} is {value!r} and must be {CHECKED_SETTINGS[name]!r}"
        for name, value in settings
        if value is not None and not _fits(name, value)
    )
    if not wrong:
        return None
    return (
        f"the sessions behind the pooler have settings that the relay cannot work with: {wrong}: "
        "run outbox-relay migrate --role-settings, which sets them for the relays' roles in this database (or ALTER "
        "ROLE … IN DATABASE … SET …), and let the pooler reconnect"
    )


def _fits(name: str, value: str) -> bool:
    if name == "search_path":  # the system's functions come first, also if the path does not name their schema
        return "pg_catalog" not in [schema.strip().strip('"') for schema in value.split(",")][1:]
    if name in _MIN_SECONDS:
        number = value.rstrip("abcdefghijklmnopqrstuvwxyz")
        return value == "0" or int(number) * _UNITS.get(value[len(number) :], 0.001) >= _MIN_SECONDS[name]
    if name == "TimeZone":
        return value.lower() in _UTC
    return value.partition(",")[0] == CHECKED_SETTINGS[name]
