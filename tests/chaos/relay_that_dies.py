"""Program that runs a relay which kills itself at a point that a signal from outside would miss.

`python -m tests.chaos.relay_that_dies run -c FILE` behaves like `outbox-relay run` until it receives SIGUSR1 or
SIGUSR2. The handler then wraps a method, so that the process dies by SIGKILL when it next passes the point. The product
contains no code for this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from psycopg.pq import TransactionStatus

from outbox_relay import cli
from outbox_relay.domain.outcomes import Delivered, Verdict
from outbox_relay.postgres.connection import Connection
from outbox_relay.postgres.shards import Claimed
from outbox_relay.postgres.store import Store
from outbox_relay.sinks.calls import Call

Point = Literal["after claim", "after acknowledgement", "inside settle"]


def die() -> NoReturn:
    """Send SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("outlived SIGKILL")


def _after_claim() -> None:
    """Die when shards were claimed and nothing was read from them."""
    original = Store.claim_shards

    def claim_shards(self: Store, *given: Any, **named: Any) -> list[Claimed]:
        claimed = original(self, *given, **named)
        return die() if claimed else claimed

    Store.claim_shards = claim_shards


def _after_acknowledgement() -> None:
    """Die when a destination has acknowledged events and none of them is settled."""
    end = Call.end

    def ended(self: Call, verdicts: Sequence[Verdict] | None) -> None:
        end(self, verdicts)
        if verdicts is None or any(isinstance(verdict, Delivered) for verdict in verdicts):
            die()

    Call.end = ended


def _inside_settle() -> None:
    """Die when the statement of a settlement was sent and is not answered."""
    original = Connection.wait

    def wait(self: Connection, gen: Generator[Any, Any, Any], *given: Any, **named: Any) -> Any:
        return original(self, _dying(self, gen), *given, **named)

    def _dying(connection: Connection, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        try:
            wanted = next(gen)
            while True:
                if getattr(settling, "now", False) and connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    connection.pgconn.flush()
                    die()
                wanted = gen.send((yield wanted))
        except StopIteration as end:
            return end.value

    settling, settle = threading.local(), Store.settle

    def settled(self: Store, *given: Any, **named: Any) -> Any:
        settling.now = True
        return settle(self, *given, **named)

    Connection.wait, Store.settle = wait, settled


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
