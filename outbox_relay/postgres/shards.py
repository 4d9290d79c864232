"""Shards, their positions, and the relays that own them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.errors import PositionsMissing
from outbox_relay.domain.routing import SinkRoutes
from outbox_relay.domain.window import Position
from outbox_relay.postgres.database import Database
from outbox_relay.postgres.parameters import PositionColumns, array_text


class Claimed(NamedTuple):
    """A shard that this relay owns.

    ``crashes`` is the number of times its lease expired since its position last advanced.
    """

    shard: int
    epoch: int
    crashes: int


class RelayRank(NamedTuple):
    """The number of live relays that serve a sink, and the number of them with an id below this relay's."""

    sink: str
    relays: int
    before: int


class ShardStatements(Database):
    """Ownership of shards, positions, and heartbeats of relays. ``server`` as in ``LogStatements``."""

    def renew_sessions(
        self, owner: UUID, sinks: Iterable[str], lease_seconds: float, deadline: float | None = None
    ) -> dict[str, dict[int, int]]:
        """Renew the leases of ``owner`` on these sinks, or begin them.

        Return the shards that it owns (sink → shard → epoch), which are none after the begin of a session.
        """
        owned: dict[str, dict[int, int]] = {sink: {} for sink in sinks}
        parameters = {"owner": owner, "sinks": list(owned), "lease": lease_seconds}
        for sink, shard, epoch in self.named("renew_sessions", parameters, deadline):
            owned[sink][shard] = epoch
        return owned

    def claim_shards(
        self,
        sink: str,
        owner: UUID,
        generation: int,
        most: int,
        *,
        known: Iterable[int] = (),
        routes: SinkRoutes | None = None,
    ) -> list[Claimed]:
        """Claim up to ``most`` free shards.

        A shard of ``owner`` that is not ``known`` is free too. None is claimed without a session of ``owner``, or
        unless ``generation`` is in force, with ``routes`` if these are given.
        """
        parameters = {
            "sink": sink,
            "owner": owner,
            "generation": generation,
            "patterns": None if routes is None else list(routes.patterns),
            "claim": None if routes is None else routes.claim,
            "most": most,
            "known": list(known),
        }
        return self.named("claim_shards", parameters, row=Claimed)

    def reclaim_shards(self, sink: str, owner: UUID) -> list[Claimed]:
        """Raise the epochs of all shards of ``owner``, which invalidates settlements under the old ones."""
        return self.named("reclaim_shards", {"sink": sink, "owner": owner}, row=Claimed)

    def release_shards(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Release shards (shard → epoch)."""
        self._do("release_shards", {"sink": sink, "owner": owner, **_shards(held)})

    def end_session(self, sink: str, owner: UUID) -> None:
        """Release every shard of ``owner``, and end its lease on the sink."""
        self._do("end_session", {"sink": sink, "owner": owner})

    def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count of shards (shard → epoch) whose position has advanced."""
        self._do("reset_crashes", {"sink": sink, "owner": owner, **_shards(held)})

    # -- positions --------------------------------------------------------------------------------------------

    def positions(self, sink: str, shards: Iterable[int], *, server: str | None = None) -> dict[int, Position]:
        """Return the stored positions of these shards.

        Raises ``PositionsMissing`` if one of them has none.
        """
        wanted = list(shards)
        rows = self.named("positions", {"sink": sink, "shards": wanted, "server": server})
        positions = {row.shard: PositionColumns._make(row[1:]).position for row in rows}
        if missing := sorted(set(wanted) - positions.keys()):
            raise PositionsMissing(missing_positions(sink, missing))
        return positions

    def missing_positions(self) -> dict[str, list[int]]:
        """Return the shards without a position by sink; sinks without such a shard are left out."""
        return dict(self.named("missing_positions", {}))

    # -- relays -----------------------------------------------------------------------------------------------

    def heartbeat(self, relay: UUID, name: str, version: str, sinks: Sequence[str], deadline: float) -> bool:
        """Record that this relay is alive and serves ``sinks``. Return False if its settings are not recorded."""
        parameters = {"id": relay, "name": name, "version": version, "sinks": list(sinks)}
        return not self.value("heartbeat", parameters, deadline=deadline)

    def config_key(self) -> bytes:
        """Return the key under which the secrets of recorded settings are hashed."""
        return bytes(self.value("config_key"))

    def record_config(self, relay: UUID, config: str) -> None:
        """Record the settings, a JSON object, that this relay runs with."""
        self._do("record_config", {"id": relay, "config": config})

    def relay_ranks(self, relay: UUID, sinks: Sequence[str], lease_seconds: float) -> list[RelayRank]:
        """Return how the live relays share these sinks. A relay is live for ``lease_seconds`` after its heartbeat."""
        return self.named("relay_ranks", {"id": relay, "sinks": list(sinks), "lease": lease_seconds}, row=RelayRank)

    def forget_relay(self, relay: UUID) -> None:
        """Delete the heartbeat of a relay that stops."""
        self._do("forget_relay", {"id": relay})


def missing_positions(sink: str, shards: Sequence[int]) -> str:
    """Return the error message, with the fix, for ``shards`` of ``sink`` that have no position."""
    some = ", ".join(map(str, shards[:8])) + (", …" if len(shards) > 8 else "")
    return (
        f"sink {sink}: {len(shards)} of its shards have no position ({some}): rows of outbox.progress were deleted. "
        "Stop every relay, then run outbox-relay rebase, which makes them read the log from the beginning"
    )


def _shards(held: Mapping[int, int]) -> dict[str, str]:
    return {"shards": array_text(held), "epochs": array_text(held.values())}
