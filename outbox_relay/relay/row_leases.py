"""The ids of leases of rows."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

_RANDOM_BITS = 76
_LOW_BITS, _TIME_BITS = (1 << _RANDOM_BITS) - 1, (1 << 48) - 1


def new_row_lease(began_at: datetime) -> UUID:
    """Return the id of a new lease for a delivery that began at ``began_at``, by the database's clock.

    It is a UUID of version 7, which contains that time: the command ``running`` shows it.
    """
    milliseconds = int(began_at.timestamp() * 1000) & _TIME_BITS
    return UUID(int=(milliseconds << 80) | (7 << _RANDOM_BITS) | (uuid4().int & _LOW_BITS))
