"""What a database error means for the relay: wait and try again, or tell somebody. Never the error's own text whole."""

from __future__ import annotations

import psycopg

from outbox_relay.errors import DatabaseLost, RelayError, Unusable

MENDING = {
    "28": "user name or password were refused: check the DSN and pg_hba.conf",
    "3D": "the database in the DSN does not exist: create it or correct the DSN",
    "3F": "schema outbox is missing: run outbox-relay migrate",
    "42501": "the role lacks rights: run outbox-relay migrate --grant-relay ROLE",
    "42P01": "a table of schema outbox is missing: run outbox-relay migrate",
    "42883": "a function of schema outbox is missing: run outbox-relay migrate",
    "42703": "a column of schema outbox is missing: run outbox-relay migrate",
}


def explain(error: psycopg.Error) -> RelayError:
    """``DatabaseLost`` for what passes by itself, ``Unusable`` for what somebody must mend.

    psycopg's own text may hold rows, passwords or whole DSNs; only the server's primary message and the SQLSTATE
    are passed on.
    """
    state = error.sqlstate or error.diag.sqlstate or ""
    mending = MENDING.get(state) or MENDING.get(state[:2])
    said = error.diag.message_primary or type(error).__name__
    if mending:
        return Unusable(f"{said} ({state}): {mending}")
    return DatabaseLost(f"{said} ({state or 'no answer'})")
