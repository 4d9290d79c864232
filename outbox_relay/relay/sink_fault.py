"""The reason why a process cannot serve a sink."""

from __future__ import annotations

from outbox_relay.domain.errors import DatabaseUnusable, PositionsMissing, RelayError
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.sinks import RunsHandlers, Sink

FORMER = "the sink was removed: take its name out of the settings, or run outbox-relay sinks remove {} --forget"
"""The fault of a sink that was removed, whose name is not registered again."""
RENAMED = (
    "the sink is now called {} in the database: change its name in the settings, and restart the relay; for another "
    "sink of the name {}, run outbox-relay sinks remove {} --forget"
)
"""The fault of a sink that has another name in the database."""
REMOVED = (
    "the sink was removed from the database: restart the relay to register it again, or take it out of the settings"
)
"""The fault of a sink that is no longer in the database, and whose name is free."""
OTHER_CLAIM = (
    'the sink has claim = "{}" in the database, which changes once no relay serves it and none of its rows is to be '
    "delivered: set it back until then, or give the sink a new name"
)
"""The fault of a sink that cannot be served with the ``claim`` of the settings yet."""


class SinkFault:
    """Keeps a refusal of the database, and finds the fault of one sink."""

    def __init__(self, leases: SinkLeases) -> None:
        self._leases = leases
        self._refusal: DatabaseUnusable | None = None

    def of(self, spec: SinkSpec, sink: Sink) -> str | None:
        """Return the reason why ``sink`` cannot be served; None if it can."""
        if self._leases.removed:
            if (new := self._leases.renamed_to) is not None:
                return RENAMED.format(new, spec.name, spec.name)
            return FORMER.format(spec.name) if self._leases.former else REMOVED
        if self._leases.superseded and self._leases.row.claim != spec.claim:
            return OTHER_CLAIM.format(self._leases.row.claim)
        if self._refusal:
            return str(self._refusal)
        return sink.fault if isinstance(sink, RunsHandlers) else None

    def refuse(self, error: RelayError) -> None:
        """Keep a refusal of the database. Missing positions outlast any other one."""
        self.session_begins()
        if isinstance(error, DatabaseUnusable) and (self._refusal is None or isinstance(error, PositionsMissing)):
            self._refusal = error

    def session_begins(self) -> None:
        """Forget a refusal, except missing positions.

        Those last until the positions of owned shards are known.
        """
        if not isinstance(self._refusal, PositionsMissing):
            self._refusal = None

    def shards_are_owned(self) -> None:
        """Forget every refusal."""
        self._refusal = None
