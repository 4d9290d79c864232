"""Retries and discards for the admin: the same functions as of ``outbox-relay dead``, with the user in the audit."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from outbox_relay.contrib.django.databases import dsn_of, is_pooled
from outbox_relay.contrib.django.models import EventDelivery
from outbox_relay.domain.errors import RelayError

SECONDS: Final = 20.0
"""Time after which an action ends; what it has done by then is kept."""
RETRIED: Final = ("dead", "waiting")
"""The states in which a delivery can be retried."""
SCHEDULED: Final = "scheduled"


@dataclass(slots=True)
class ActionOutcome:
    """The number of deliveries that an action changed and left, and the reason if it ended early."""

    done: int = 0
    left: int = 0
    problem: str | None = None


def retry(alias: str, deliveries: Iterable[EventDelivery], actor: str, reason: str | None) -> ActionOutcome:
    """Make deliveries due now. Those in a state that cannot be retried are left."""
    return _act(alias, "retry", deliveries, actor, reason)


def discard(alias: str, deliveries: Iterable[EventDelivery], actor: str, reason: str) -> ActionOutcome:
    """Delete deliveries, and record that they were discarded."""
    return _act(alias, "discard", deliveries, actor, reason)


def _act(alias: str, action: str, deliveries: Iterable[EventDelivery], actor: str, reason: str | None) -> ActionOutcome:
    """Act on the deliveries of each sink and state in turn."""
    groups = defaultdict[tuple[str, str], list[str]](list)
    for each in deliveries:
        groups[each.sink, each.state].append(str(each.uid))
    outcome = ActionOutcome(left=sum(map(len, groups.values())))
    if action == "retry":
        groups = {place: uids for place, uids in groups.items() if place[1] in RETRIED}
    filters = [_filter(action, sink, state, uids) for (sink, state), uids in groups.items()]
    try:
        asyncio.run(_run(alias, action, filters, actor, reason, outcome))
    except RelayError as error:
        outcome.problem = str(error)
    except TimeoutError:
        outcome.problem = f"it took more than {SECONDS:.0f} s; repeat it for the others"
    except ImportError as error:
        outcome.problem = f"{error.name} is missing: pip install 'outbox-relay[relay]'"
    outcome.left -= outcome.done
    return outcome


def _filter(action: str, sink: str, state: str, uids: list[str]) -> dict[str, Any]:
    # A row that waits for the time of its event is scheduled. It cannot be retried.
    states = [state, SCHEDULED] if state == "waiting" and action == "discard" else [state]
    return {"sink": sink, "states": states, "uids": uids}


async def _run(
    alias: str, action: str, filters: list[dict[str, Any]], actor: str, reason: str | None, outcome: ActionOutcome
) -> None:
    from outbox_relay import admin

    dsn = dsn_of(alias)
    async with (
        asyncio.timeout(SECONDS),
        admin.connect(lambda: dsn, pooler=is_pooled(alias), check_schema=True, grant="operate") as store,
    ):
        for wanted in filters:
            before = outcome.done

            def report(count: int, before: int = before) -> None:
                outcome.done = before + count

            given: Mapping[str, Any] = {"actor": actor, "reason": reason, "report": report}
            act = admin.retry_deliveries if action == "retry" else admin.discard_deliveries
            result = await act(store, wanted, **given)
            outcome.done = before + result.done
