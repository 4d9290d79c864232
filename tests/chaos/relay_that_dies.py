"""A relay that can be told to kill itself at a point where no signal from outside would meet it.

`python -m tests.chaos.relay_that_dies run -c FILE` is `outbox-relay run`, until SIGUSR1 or SIGUSR2 comes. Only then
a method is wrapped, so that the process dies by SIGKILL when it next passes the point. The product knows nothing of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from psycopg.pq import TransactionStatus

from outbox_relay import cli
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Delivered, Verdict
from outbox_relay.postgres.rows import Claimed
from outbox_relay.postgres.store import Store
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.webhook import WebhookSink

SENDING_STEPS = 1_000
"""Turns of the event loop within which a statement is sent."""
Point = Literal["after claim", "after acknowledgement", "inside settle"]


def die() -> NoReturn:
    """End by SIGKILL, now."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("outlived SIGKILL")


def _after_claim() -> None:
    """When shards were claimed and nothing was read of them."""
    original = Store.claim_shards

    async def claim_shards(self: Store, *given: Any, **named: Any) -> list[Claimed]:
        claimed = await original(self, *given, **named)
        return die() if claimed else claimed

    Store.claim_shards = claim_shards


def _after_acknowledgement() -> None:
    """When a destination has acknowledged events and nothing is settled of them."""
    for sink in (KafkaSink, WebhookSink):
        _die_after_delivery(sink)


def _die_after_delivery(sink: type[KafkaSink] | type[WebhookSink]) -> None:
    original = sink.deliver

    async def deliver(self: Any, batch: Sequence[StoredEvent], until: float, attempt: int = 1, /) -> Sequence[Verdict]:
        verdicts = await original(self, batch, until, attempt)
        return die() if any(isinstance(verdict, Delivered) for verdict in verdicts) else verdicts

    sink.deliver = deliver


def _inside_settle() -> None:
    """When the statement of a settlement was sent and is not answered."""
    original = Store._rows  # pyright: ignore[reportPrivateUsage] - the one place through which every statement goes

    async def rows(self: Store, name: str, parameters: Mapping[str, Any], *given: Any, **named: Any) -> list[Any]:
        if name != "settle":
            return await original(self, name, parameters, *given, **named)
        async with self._connection(5.0) as connection:  # pyright: ignore[reportPrivateUsage]
            statement = self._sql[name]  # pyright: ignore[reportPrivateUsage]
            sending = asyncio.ensure_future(connection.cursor(binary=True).execute(statement, parameters))
            for _ in range(SENDING_STEPS):
                if connection.pgconn.transaction_status == TransactionStatus.ACTIVE or sending.done():
                    break
                await asyncio.sleep(0)
            connection.pgconn.flush()
            die()

    Store._rows = rows  # pyright: ignore[reportPrivateUsage]


POINTS: Mapping[Point, Callable[[], None]] = {
    "after claim": _after_claim,
    "after acknowledgement": _after_acknowledgement,
    "inside settle": _inside_settle,
}
SIGNALS: Mapping[Point, signal.Signals] = {
    "after acknowledgement": signal.SIGUSR1,
    "inside settle": signal.SIGUSR2,
}


def listen() -> None:
    """From now on each of SIGNALS arms its point, one that came while it was blocked too."""
    for point, number in SIGNALS.items():
        signal.signal(number, lambda _number, _frame, arm=POINTS[point]: arm())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())


if __name__ == "__main__":
    listen()
    sys.exit(cli.main(sys.argv[1:]))
