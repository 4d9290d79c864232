"""Days of the log: what keeps them, their archives, and how they are emptied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

from outbox_relay.postgres.database import Database

FIRST = (-(1 << 63), UUID(int=0))
"""The place before the first event of a day: an id and a uid."""
_LIMITS: tuple[LiteralString, ...] = ("set local statement_timeout = '300ms'",)
"""Time limit of a statement that locks a partition, including the wait for the lock."""


class Pass(NamedTuple):
    """A pass of the retention that has the lease, with the policy. Days of 0 are indefinitely."""

    lease: int
    keep_days: int
    keep_uids_days: int
    keep_dead_days: int
    archive: bool
    hold_until: Any


class Person(NamedTuple):
    """The one who does something, for the audit, and the reason that a person gives."""

    actor: str
    reason: str | None = None


class DayCheck(NamedTuple):
    """The result of a check: what keeps a day, and its archive if a verified one has all of its events."""

    kept_by: list[dict[str, Any]]
    changed: bool
    archived: bool
    writing_to: str | None


class DayEvent(NamedTuple):
    """An event as it is archived. Times and headers are text in the form of PostgreSQL."""

    id: int
    xid: str
    shard: int
    uid: str
    type: str
    key: str | None
    content_type: str
    headers: str | None
    deliver_at: str | None
    created_at: str
    emitter: str | None
    tenant: str | None
    priority: int | None
    payload: bytes | None
    key_hash: str | None


class RetentionStatements(Database):
    """Steps of the retention. Each names its lease, and raises ``StatementFailed`` if another process has it."""

    def state_retention(self, relay: UUID, said: Mapping[str, Any] | None) -> bool:
        """Record the table ``[retention]`` of a relay, None without one. Return False before its first heartbeat."""
        parameters = {"relay": relay, "said": None if said is None else json.dumps(said)}
        return self._do("state_retention", parameters) > 0

    def begin_retention(
        self, owner: UUID, by: Person, seconds: float, *, at_once: bool, works: bool = True
    ) -> Pass | None:
        """Claim the lease for ``seconds``; return None while another process has it."""
        parameters = {**by._asdict(), "owner": owner, "seconds": seconds, "at_once": at_once, "works": works}
        [row] = self.call("begin_retention", parameters, "operate" if at_once else "relay")
        return None if row.lease is None else Pass(*row)

    def renew_retention(self, lease: int) -> None:
        """Renew the lease."""
        self.named("renew_retention", {"lease": lease})

    def end_retention(self, lease: int) -> None:
        """Release the lease."""
        self.named("end_retention", {"lease": lease})

    def due_days(self) -> list[str]:
        """Return the days that are past keep_days and hold events; -infinity is the DEFAULT partition."""
        return [row.day for row in self.named("due_days", {})]

    def check_day(self, day: str, lease: int | None) -> DayCheck:
        """Return what keeps a day, and record the check; without a lease only look."""
        return self.named("check_day", {"day": day, "lease": lease}, row=DayCheck)[0]

    def count_day(self, day: str, lease: int, after: tuple[int, UUID], most: int) -> tuple[int, int, UUID]:
        """Return the number of the next events of a checked day, at most ``most``, and id and uid of the last one."""
        parameters = {"day": day, "lease": lease, "after_id": after[0], "after_uid": after[1], "most": most}
        return self.named("count_day", parameters)[0]

    def read_day(self, day: str, lease: int, after: tuple[int, str], most: int, payload_bytes: int) -> list[DayEvent]:
        """Return the next events of a checked day by id and uid; the one that exceeds ``payload_bytes`` is the last."""
        place = {"after_id": after[0], "after_uid": after[1]}
        parameters = {"day": day, "lease": lease, **place, "most": most, "bytes": payload_bytes}
        return self.named("read_day", parameters, row=DayEvent)

    def unfinished_archives(self, day: str, lease: int) -> list[str]:
        """Return the addresses of archives of a day that were given up or superseded, and can be removed."""
        return self.value("unfinished_archives", {"day": day, "lease": lease}) or []

    def begin_archive(self, day: str, lease: int, address: str, removed: Sequence[str] = ()) -> None:
        """Record the address of an archive before its first byte is written, and forget those ``removed``."""
        parameters = {"day": day, "lease": lease, "address": address, "removed": list(removed)}
        self.named("begin_archive", parameters)

    def record_archive(self, day: str, lease: int, address: str, sha256: str, events: int) -> None:
        """Record a verified archive of what the newest check saw."""
        parameters = {"day": day, "lease": lease, "address": address, "hash": sha256, "events": events}
        self.named("record_archive", parameters)

    def empty_day(self, day: str, lease: int, events: int) -> str:
        """Empty a checked day; return its outcome: see ``outbox_internal.empty_day``."""
        return self._locking("empty_day", {"day": day, "lease": lease, "events": events})

    def leave_day(self, day: str, lease: int, reason: str) -> None:
        """Record why a pass left a day that nothing keeps."""
        self.named("leave_day", {"day": day, "lease": lease, "reason": reason})

    def drop_day(self, lease: int) -> str | None:
        """Remove an empty partition that is past keep_days; return its day, or None."""
        return self._locking("drop_day", {"lease": lease})

    def trim_uids(self, lease: int, most: int) -> tuple[int, bool]:
        """Remove old uids among the next ``most``; return their number, and whether more are to be examined."""
        return self.named("trim_uids", {"lease": lease, "most": most})[0]

    def trim_inbox(self, lease: int, most: int) -> tuple[int, bool]:
        """Remove old marks of the inbox among the next ``most``; return as ``trim_uids``."""
        return self.named("trim_inbox", {"lease": lease, "most": most})[0]

    def discard_expired(self, lease: int, most: int) -> tuple[int, bool]:
        """Discard old dead rows among the next ``most``; return their number, and whether more are to be examined."""
        return self.named("discard_expired", {"lease": lease, "most": most})[0]

    def trim_attempts(self, lease: int, most: int) -> tuple[int, bool]:  # noqa: ARG002 - a step is a partition
        """Remove old recorded attempts, one step; return as ``trim_uids``, of partitions or rows."""
        removed = self._locking("trim_attempts", {"lease": lease})
        return removed, removed > 0

    def retention_status(self, *, live: bool) -> dict[str, Any]:
        """Return the policy and the days; with ``live``, what keeps them now."""
        return self.value("retention_status", {"live": live})

    def _locking(self, name: str, parameters: Mapping[str, Any]) -> Any:
        """Return the value of a statement that locks."""
        [(value,)] = self._run(name, parameters, None, settings=_LIMITS)[0]
        return value
