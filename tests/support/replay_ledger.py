"""A ledger that owns the shards of replays, too, and settles for them as a relay would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.rows import NewRow
from tests.support.ledger import Ledger


class ReplayLedger(Ledger):
    """A ledger that owns the shards of a replay, too."""

    def claim(self, replay: int = 1, target: str = "s") -> dict[int, int]:
        """Claim every shard of a replay; return their epochs."""
        generation = self._generation(target)
        name = f"~{replay}"
        known = self._known(name)
        self.store.renew_sessions(self.relay, [name], 60.0)
        found = self.store.claim_shards(name, self.relay, generation, SHARDS, known=known)
        return {claimed.shard: claimed.epoch for claimed in found}

    def settle(
        self,
        epochs: dict[int, int],
        last: int,
        seen: int,
        *rows: NewRow,
        owner: Any = None,
        replay: int = 1,
        passed_by: Mapping[int, str] | None = None,
    ) -> bool:
        """Write that every shard of a replay stands behind `last`, and rows."""
        places = {shard: (epoch, last) for shard, epoch in epochs.items()}
        return self.store.settle_replay(*(replay, owner or self.relay, places, seen, rows, epochs), passed_by=passed_by)

    def let_go(self) -> None:
        """Release the shards of every replay, as a relay does whose replay has ended."""
        self.do("update outbox.shard set owner = null where sink like '~%%'")
