"""Values that the store takes and returns, apart from events and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt
from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.domain.window import Tick

MOST_PAYLOAD = 1 << 30
"""More bytes than any payload has, so that only the ceiling of the schema applies."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """A tick with the server's incarnation, and its clock.

    ``config_versions`` counts changes of the configuration and of positions. It is higher after each of them.
    """

    tick: Tick
    incarnation: str
    now: datetime
    config_versions: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowRequest:
    """The window that a session reads next: events of ``shards`` and ``types``, from the tick ``a`` on.

    ``types`` are SQL LIKE patterns. Ids up to ``floor`` are of an older numbering. A window of more than ``most_ids``
    ids is not read. ``most_events`` and ``most_bytes``, not counting the last event, limit the latecomers and the other
    events, each. A larger payload than ``most_payload`` bytes is not returned. With ``most_size``, the other events are
    read up to the first one that has more bytes, and ``most_bytes`` does not limit them.
    """

    a: Tick
    floor: int
    shards: frozenset[int]
    types: Sequence[str] | None
    most_ids: int = 4_000
    most_events: int = 1_000
    most_bytes: int = 1 << 20
    most_payload: int = 256 << 10
    most_size: int | None = None


class WindowRead(NamedTuple):
    """The events of a requested window up to the tick ``b``, in id order.

    They are all, or those with ids up to ``upto``. Without ``usable``, the window must be read in the usual way. If it
    ``is_cut``, it ends before an event that was not small.
    """

    request: WindowRequest
    b: Tick
    events: list[StoredEvent]
    upto: int | None
    usable: bool = True
    is_cut: bool = False

    @property
    def empty(self) -> bool:
        """True if the window has no events."""
        return self.usable and not self.events and self.upto is None


class Look(NamedTuple):
    """A tick, the events of the requested window if they were read, and the duration of the round trip in seconds."""

    result: TickResult
    window: WindowRead | None
    seconds: float


class Claimed(NamedTuple):
    """A shard that this relay owns.

    ``crashes`` is the number of times its lease expired since its position last advanced.
    """

    shard: int
    epoch: int
    crashes: int


class SinkRow(NamedTuple):
    """The state of a sink in the database.

    ``patterns`` are those of ``generation``. ``in_flight_limit`` is the concurrency of a relay after the destination
    requested less; None means the configured maximum. ``owned`` is the number of shards that other relays own.
    ``last_error_open`` is False if there is no last error, or if it is recorded that it is over. ``probes`` is the
    number of requests by people to probe the destination now. ``claim`` is the setting of ``generation``. The three
    after it are as in ``SinkLimits``. ``start`` is "beginning" or "now": where the sink began; None for a replay.
    """

    name: str
    generation: int
    paused: bool
    circuit: str
    in_flight_limit: int | None
    owned: int
    patterns: Sequence[str]
    last_error_open: bool = False
    probes: int = 0
    claim: str = "log"
    rate_per_second: float | None = None
    max_in_flight_total: int | None = None
    spread_seconds: float | None = None
    start: str | None = None

    @property
    def limits(self) -> SinkLimits:
        """The limits across all relays."""
        return SinkLimits(self.rate_per_second, self.max_in_flight_total, self.spread_seconds)


class ScheduledPlace(NamedTuple):
    """A place in the order in which scheduled events enter the log: the text of a time of the database, and an id."""

    time: str
    id: int


class Entries(NamedTuple):
    """The entry of scheduled events into the log.

    ``entered`` is their number, or None while another session lets events enter. ``last`` is the place of the last one,
    and ``due_in`` the seconds until the next one is due; None if there is none.
    """

    entered: int | None
    last: ScheduledPlace | None
    due_in: float | None


class RelayRank(NamedTuple):
    """The number of live relays that serve a sink, and the number of them with an id below this relay's."""

    sink: str
    relays: int
    before: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of ``delivery`` to be created from an event of the log.

    ``due_in`` is in seconds from now. None means the event's ``deliver_at``, or now if it has none. A row that is
    created leased, because its request is in flight, has ``lease`` and ``lease_for`` seconds. ``record`` is the
    attempt to be recorded, if any.
    """

    id: int
    shard: int
    state: str
    ordered: bool
    due_in: float | None = None
    attempts: int = 0
    claims: int = 0
    lease: UUID | None = None
    lease_for: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None


class RowPlace(NamedTuple):
    """A place in the order in which claims find rows: when a row was due, in seconds since 1970, and its id."""

    due: float
    id: int


class ClaimedRow(NamedTuple):
    """A leased row of ``delivery``: its event, its counters, and the lease that fences its settlement.

    An ``ordered`` row takes part in the order of its key: later rows of the key wait for it. ``tried`` is False if it
    is known that there was no attempt before. ``due`` is the time in seconds since 1970 at which the row was due, or
    None where it is not read.
    """

    event: StoredEvent
    ordered: bool
    attempts: int
    claims: int
    lease: UUID
    tried: bool = True
    due: float | None = None

    @property
    def place(self) -> RowPlace | None:
        """The place in the order in which claims find rows, or None if it was not read."""
        return None if self.due is None else RowPlace(self.due, self.event.id)


class DeliveredRow(NamedTuple):
    """A leased row that was delivered, and the attempt to be recorded, if any."""

    id: int
    lease: UUID
    record: AttemptRecord | None = None


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """The update of a leased row that was not delivered.

    ``attempts`` is the new count. ``state`` and ``due_in`` (seconds) are left unchanged if they are None. ``record`` is
    the attempt to be recorded, if any.
    """

    id: int
    lease: UUID
    attempts: int
    state: str | None = None
    due_in: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None
    record: AttemptRecord | None = None
