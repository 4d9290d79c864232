"""The registration of one sink, which a restore of the database may take back."""

from __future__ import annotations

import time

from structlog.stdlib import BoundLogger

from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.log import TickResult
from outbox_relay.postgres.store import Store
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.sink_leases import SinkLeases


class SinkRegistration:
    """The knowledge of a sink's registration, over all sessions, and the registration again."""

    def __init__(self, store: Store, keeper: Keeper, leases: SinkLeases) -> None:
        self._store = store
        self._keeper = keeper
        self._leases = leases
        self.began: TickResult | None = None
        """The tick with which the session began."""
        self.seen_in: str | None = None
        """The incarnation of the server that had the sink last; None if it is not to be registered again."""
        self._observations = 0
        """The number of answers that had the sink before the session."""
        self._start = "now"
        """The place in the log where the sink began, as of that server."""
        self._missing_since = 0.0
        """``time.monotonic()`` of the last look at which the database had the sink."""

    def begin_session(self, began: TickResult) -> None:
        """Record that a session begins with the tick ``began``."""
        self.began, self._observations = began, self._leases.observations

    def was_taken_back(self) -> bool:
        """Return True if a restore has taken the registration back, so that the sink is to be registered again.

        A sink that is missing on the server that had it was removed, and stays away. A relay that was superseded leaves
        it to the others for a while.
        """
        leases, began = self._leases, self.began
        if began is None:
            return False
        if not leases.missing:
            self._missing_since = time.monotonic()
            if leases.observations > self._observations:
                self.seen_in, self._start = began.incarnation, leases.row.start or "now"
            return False
        if self.seen_in is None:
            return False
        server = self._store.tick().incarnation  # the last tick may be older than what is missing
        if server == self.seen_in:
            self.seen_in = None
        if self.seen_in is None or server != began.incarnation:
            return False
        patience = 2 * self._keeper.lease_seconds * leases.superseded
        return time.monotonic() - self._missing_since >= patience

    def register(self, spec: SinkSpec, log: BoundLogger) -> bool:
        """Register the sink. Return False if it is there by now, since another relay has registered it.

        It begins as it had begun: at the beginning of the log, or with this session.
        """
        began = self.began
        assert began is not None  # noqa: S101 - ``was_taken_back`` has looked
        server = began.incarnation
        generation = self._store.register_missing_sink(
            spec.name, spec.patterns, self._start, began.tick, queued=spec.queued, server=server
        )
        if generation is None:
            return False
        self._leases.registered(generation, spec.routes)
        self.seen_in = server
        log.warning("sink.registered_again", start=self._start, since=began.now.isoformat())
        self._store.state_limits({spec.name: spec.limits}, server)
        return True

    def serve_again(self, spec: SinkSpec, log: BoundLogger, *, idle: bool) -> bool:
        """Serve a sink again that was lost to a restore or to relays that are gone. Return True if it is served.

        Rows of a queue may still be in hand: until the session is ``idle``, another would repeat them.
        """
        leases = self._leases
        if spec.replay is not None or leases.stopping:
            return False
        taken_back = self.was_taken_back()
        if not idle:
            return False
        if taken_back:
            return self.register(spec, log)
        if not leases.superseded or leases.held:
            return False
        differs = tuple(leases.row.patterns) != tuple(spec.patterns) or leases.row.claim != spec.claim
        if differs and not leases.abandoned:
            return False
        result = self._store.tick()
        generation = self._store.reregister_sink(
            *(spec.name, spec.patterns, leases.row.generation, result.tick),
            queued=spec.queued,
            server=result.incarnation,
        )
        if generation is None:
            return False
        leases.serve(generation, spec.routes)
        return True
