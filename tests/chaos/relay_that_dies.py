"""Program that runs a relay which kills itself at a point that a signal from outside would miss.

`python -m tests.chaos.relay_that_dies run -c FILE` behaves like `outbox-relay run` until it receives SIGUSR1 or
SIGUSR2. The handler then wraps a method, so that the process dies by SIGKILL when it next passes the point. The product
contains no code for this.
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
"""Most iterations of the event loop until a statement is sent."""
Point = Literal["after claim", "after acknowledgement", "inside settle"]


def die() -> NoReturn:
    """Send SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("outlived SIGKILL")


def _after_claim() -> None:
    """Die when shards were claimed and nothing was read from them."""
    original = Store.claim_shards

    async def claim_shards(self: Store, *given: Any, **named: Any) -> list[Claimed]:
        claimed = await original(self, *given, **named)
        return die() if claimed else claimed

    Store.claim_shards = claim_shards


def _after_acknowledgement() -> None:
    """Die when a destination has acknowledged events and none of them is settled."""
    for sink in (KafkaSink, WebhookSink):
        _die_after_delivery(sink)


def _die_after_delivery(sink: type[KafkaSink] | type[WebhookSink]) -> None:
    original = sink.deliver

    async def deliver(self: Any, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        verdicts = await original(self, batch, until, attempt)
        return die() if any(isinstance(verdict, Delivered) for verdict in verdicts) else verdicts

    sink.deliver = deliver


def _inside_settle() -> None:
    """Die when the statement of a settlement was sent and is not answered."""
    original = Store._rows  # pyright: ignore[reportPrivateUsage] - every statement passes through it

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
    """Install the handlers that arm the points, and unblock the signals; pending ones are delivered."""
    for point, number in SIGNALS.items():
        signal.signal(number, lambda _number, _frame, arm=POINTS[point]: arm())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS.values())


if __name__ == "__main__":
    listen()
    sys.exit(cli.main(sys.argv[1:]))
