"""The delivery state of one event, sink by sink."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox_relay.admin.attempts import newest_attempts, unknown_event
from outbox_relay.postgres.store import Store


async def why(store: Store, uid: UUID) -> dict[str, Any]:
    """Return the event ``uid`` and its state in each sink, for ``why --json``.

    ``outbox.why`` finds the states out, which docs/commands.md describes with their fields. ``attempts_recorded`` are
    the newest recorded attempts at the sink, oldest first. No payload and no header value is read.

    Raises ``NotFound`` if neither the log, ``delivery``, a mark of a discard nor a record has the event,
    ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    found: dict[str, Any] | None = (await store.named("why", {"uid": uid}))[0].found
    if found is None:
        raise unknown_event(uid)
    recorded = await newest_attempts(store, uid)
    found["sinks"] = {
        name: {"state": sink["state"], **sink, "attempts_recorded": recorded.get(name, [])}
        for name, sink in found["sinks"].items()
    }
    return found
