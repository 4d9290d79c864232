"""The argument of a handler, and the exceptions by which a handler decides. Imports the standard library.

A handler is the function of an application that a sink with ``type = "python"`` calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

PUBLIC: Final = "outbox_relay"
"""The module under which the names are known, such as in traces."""
MOST_SECONDS: Final = 86_400.0
"""Maximum of ``extend``, in seconds."""
MOST_DELAY_SECONDS: Final = 31_536_000.0
"""Maximum of ``Retry.after``, in seconds."""


class Retry(Exception):
    """Raised by a handler to have the event delivered again: a failed attempt.

    ``after`` is the least delay in seconds, or a ``timedelta``; None: the delay of the sink's settings. ``reason`` is
    stored for people and should name no payload and no secret.
    """

    __module__ = PUBLIC

    def __init__(self, after: float | timedelta | None = None, reason: str = "") -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and not _is_within(seconds, 0.0, MOST_DELAY_SECONDS):
            raise ValueError(f"after must be a number of seconds from 0 to {MOST_DELAY_SECONDS:g}")
        super().__init__(reason)
        self.after = None if seconds is None else float(seconds)
        self.reason = str(reason)


class Dead(Exception):
    """Raised by a handler that will never accept the event: it becomes a dead letter.

    ``reason`` is stored for people and should name no payload and no secret.
    """

    __module__ = PUBLIC

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = str(reason)


@dataclass(slots=True, eq=False, repr=False)
class Delivery:
    """One delivery of an event to a handler.

    ``attempt`` counts from 1. ``headers`` are the event's own, and ``outbox-replay`` in a replay. ``tenant`` is that
    of the event, and None if it has none or is no longer in the log. ``deadline`` is the end of the time limit.
    ``connection`` is the psycopg connection whose transaction holds the mark of the event, with ``transaction = true``,
    otherwise None.
    """

    uid: UUID
    type: str
    key: str | None
    payload: bytes = field(repr=False)
    content_type: str
    headers: Mapping[str, str] = field(repr=False)
    attempt: int
    created_at: datetime
    deliver_at: datetime | None
    deadline: datetime
    tenant: str | None = None
    connection: Any = None
    _extend: Callable[[float], datetime | None] | None = None

    def __repr__(self) -> str:
        return f"Delivery(uid={str(self.uid)!r}, type={self.type!r}, attempt={self.attempt})"

    def json(self) -> Any:
        """Return the payload as ``json.loads`` does. Raises ``ValueError`` if it is not JSON."""
        return json.loads(self.payload)

    def extend(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from now, above 0 and at most 86400, unless it is later already.

        May be called from any thread, and again. Raises ``ValueError`` for any other number.
        """
        if not _is_within(seconds, 0.0, MOST_SECONDS) or seconds == 0:
            raise ValueError(f"seconds must be a number above 0 and at most {MOST_SECONDS:g}")
        if self._extend is not None and (deadline := self._extend(float(seconds))) is not None:
            self.deadline = deadline


def _is_within(value: object, least: float, most: float) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and least <= value <= most
