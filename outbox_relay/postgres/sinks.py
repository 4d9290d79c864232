"""Sinks: registration, state and circuit, and the figures and history that relays record of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.database import Database


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


class FiguresClaim(NamedTuple):
    """The answer to a claim: a token, or None while another relay measures, and the database's POSIX time."""

    token: UUID | None
    now: float


class SinkStatements(Database):
    """Registration, state and figures of sinks. ``server`` as in ``LogStatements``."""

    def register_sinks(
        self,
        wanted: Iterable[tuple[str, Sequence[str], str | None]],
        tick: Tick,
        *,
        queued: Collection[str] = (),
        server: str | None = None,
    ) -> dict[str, int]:
        """Register sinks (name, patterns, start); return the generations under which this relay serves them.

        A new sink may begin at ``tick``. Those of ``queued`` have ``claim = "rows"``. The generation is 0 for the
        former name of a sink, which is not registered, and for a sink that cannot get another ``claim`` yet.
        """
        sinks = [
            {"name": name, "patterns": list(patterns), "start": start, "claim": _claim(name in queued)}
            for name, patterns, start in wanted
        ]
        registered = dict(self.named("register_sinks", {**_registration(sinks, tick), "server": server}))
        self.value("trim_routes")  # completes those that this has committed
        return registered

    def register_missing_sink(
        self, name: str, patterns: Sequence[str], start: str, tick: Tick, *, queued: bool, server: str
    ) -> int | None:
        """Register a sink that is missing; return its generation. None if it is there, or may not be registered."""
        sink = {"name": name, "patterns": list(patterns), "start": start, "claim": _claim(queued)}
        rows = self.named("register_missing_sinks", {**_registration([sink], tick), "server": server})
        return dict(rows).get(name) or None

    def reregister_sink(
        self,
        name: str,
        patterns: Sequence[str],
        generation: int,
        tick: Tick,
        *,
        queued: bool = False,
        server: str | None = None,
    ) -> int | None:
        """Set patterns and claim of a sink if ``generation`` is still its newest, or if they are already in force.

        Return the generation under which the sink has them; None if another configuration is in force by now.
        """
        registration = _registration([{"name": name, "patterns": list(patterns), "claim": _claim(queued)}], tick)
        conditions = {"only_from": generation, "patterns": list(patterns), "server": server}
        rows = self.named("reregister_sink", {**registration, **conditions})
        self.value("trim_routes")
        return rows[0].generation if rows else None

    def sinks(self, names: Iterable[str], deadline: float | None = None, *, relay: UUID | None = None) -> list[SinkRow]:
        """Return the state of these sinks, as ``relay`` sees it; unknown names are left out."""
        return self.named("sinks", {"sinks": list(names), "relay": relay}, deadline, row=SinkRow)

    def former_sinks(self, names: Iterable[str], deadline: float | None = None) -> set[str]:
        """Return those of ``names`` that removed sinks had."""
        return {row.name for row in self.named("former_sinks", {"sinks": list(names)}, deadline=deadline)}

    def state_limits(self, limits: Mapping[str, SinkLimits], server: str | None = None) -> None:
        """Put the limits of sinks in force on all relays."""
        stated = [{"sink": sink, **each._asdict()} for sink, each in limits.items()]
        self._do("state_limits", {"limits": json.dumps(stated), "server": server})

    # -- state ------------------------------------------------------------------------------------------------

    def record_circuit(
        self, sink: str, circuit: str, error: str | None, in_flight_limit: int | None, pause_after_seconds: float
    ) -> str | None:
        """Record the circuit and the last error of a sink, for people.

        ``in_flight_limit`` is the concurrency after the destination requested less; None means the configured maximum.
        The sink is paused if it has been down for ``pause_after_seconds``; 0 means never. Return the reason if this
        paused it, otherwise None.
        """
        parameters = {
            "sink": sink,
            "circuit": circuit,
            "error": error,
            "in_flight_limit": in_flight_limit,
            "pause_after": int(pause_after_seconds),
        }
        rows = self.named("record_circuit", parameters)
        return rows[0].paused_reason if rows else None

    def record_failure(self, sink: str, error: str) -> None:
        """Record the last error of a sink whose circuit is closed."""
        self._do("record_failure", {"sink": sink, "error": error})

    def record_mended(self, sink: str, *, own: bool) -> None:
        """Record that the last error of a sink is over, if its circuit is closed.

        An error that is not the caller's ``own`` must be three minutes old.
        """
        self._do("record_mended", {"sink": sink, "own": own})

    def record_trouble(self, sink: str, error: str | None) -> None:
        """Record an error that the sink's client met without an event; None clears such an error."""
        self._do("record_trouble", {"sink": sink, "error": error})

    def pause_sink(self, sink: str, reason: str) -> bool:
        """Pause a sink whose destination is gone for good, and record the ``reason``.

        Return False if it was paused already.
        """
        return self._do("pause_sink", {"sink": sink, "reason": reason}) > 0

    def notify_sinks(self, lagging_seconds: float) -> list[tuple[str, float, bool]]:
        """Make the notices that are due; return every sink, the seconds that it lags, and whether it is paused."""
        return self.named("notify_sinks", {"lagging": lagging_seconds})

    # -- figures that one relay measures for all, and the history that each adds to ---------------------------

    def claim_figures(self, relay: UUID, seconds: float) -> FiguresClaim:
        """Claim the measuring of figures for ``seconds``."""
        return FiguresClaim(*self.measure("claim_figures", {"relay": relay, "seconds": seconds})[0])

    def store_figures(self, relay: UUID, token: UUID, figures: Mapping[str, Any]) -> bool:
        """Store figures for every relay. Return False if the claim has lapsed."""
        parameters = {"relay": relay, "token": token, "figures": json.dumps(figures)}
        return self.measure("store_figures", parameters)[0].exists

    def stored_figures(self) -> tuple[object, float]:
        """Return the stored figures, which any version may have written, and the database's POSIX time."""
        rows = self.measure("stored_figures", {})
        return (rows[0].figures, rows[0].now) if rows else (None, 0.0)

    def add_history(self, minute: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of sinks to the present minute of the history."""
        self.measure("add_history", {"minute": json.dumps(minute)})


def _claim(queued: bool) -> str:
    return "rows" if queued else "log"


def _registration(sinks: Sequence[dict[str, Any]], tick: Tick) -> dict[str, Any]:
    return {"wanted": json.dumps(sinks), "seq": tick.seq, "snapshot": tick.snapshot, "next": tick.next_xid}
