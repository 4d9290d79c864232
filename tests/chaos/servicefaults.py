"""What is asked of running relays from outside: other routes by SIGHUP, and more connections than anyone needs."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

from tests.chaos.fleet import Fleet, Relay
from tests.chaos.nemesis import Strike
from tests.support.ports import LOOPBACK
from tests.support.wait import NotInTime, until

ROUTE = '"shop.*" = ["webhook"]\n'
MORE = '"shop.o*" = ["webhook"]\n'
"""Matches nothing that the other one does not: which events a sink gets stays the same."""
BETWEEN_SECONDS = (0.0, 1.0)
"""Between one relay and the next: configurations of both kinds run beside each other."""
LISTEN_SECONDS = 30.0
"""How long a relay that joins may take until it listens."""
CONNECTIONS = 400
FLOOD_SECONDS = (2.0, 5.0)
HEAD = b"GET /readyz HTTP/1.1\r\nHost: relay\r\n"


@dataclass
class Reload:
    """SIGHUP to one relay after the other, with a pattern that comes with one strike and goes with the next."""

    fleet: Fleet
    fault: str = "reload"

    def strike(self, rng: random.Random) -> Strike:
        """Change every file, then tell every relay that listens."""
        began = time.monotonic()
        more = MORE not in self.fleet.guest.config.read_text()
        for relay in self.fleet.all:
            _write(relay, more)
        told = 0
        for relay in self.fleet.all:
            if relay.runs and _listens(relay, 0.0 if relay in self.fleet.relays else LISTEN_SECONDS):
                relay.child.send(signal.SIGHUP)
                told += 1
            time.sleep(rng.uniform(*BETWEEN_SECONDS))  # a rollout takes its time
        return Strike(self.fault, began, time.monotonic(), f"{told} relays, {'with' if more else 'without'} a pattern")


def _listens(relay: Relay, seconds: float) -> bool:
    """Wait until a relay listens that may have read its file before it was changed; return False if it does not.

    Without a SIGHUP it would be superseded, and never get the shards that its own strike waits for.
    """
    with contextlib.suppress(NotInTime):
        until(lambda: relay.ask("/livez")[0] or not relay.runs, seconds=seconds, what=f"{relay.name} listens")
        return relay.runs
    return False


def _write(relay: Relay, more: bool) -> None:
    """In one step: a relay that starts meanwhile reads the one file or the other."""
    text = relay.config.read_text().replace(MORE, "")
    new = relay.config.with_suffix(".new")
    new.write_text(text.replace(ROUTE, ROUTE + MORE) if more else text)
    new.rename(relay.config)


@dataclass
class HealthFlood:
    """Connections to a relay's listener that say half of a request, or nothing, and stay."""

    fleet: Fleet
    fault: str = "health flood"

    def strike(self, rng: random.Random) -> Strike:
        """Flood one for a while."""
        relay = rng.choice(self.fleet.relays)
        began = time.monotonic()
        with ExitStack() as held:
            made = sum(_connected(held, relay.port, rng) for _ in range(CONNECTIONS))
            time.sleep(rng.uniform(*FLOOD_SECONDS))  # the fault itself
        return Strike(self.fault, began, time.monotonic(), f"{made} connections to {relay.name}")


def _connected(held: ExitStack, port: int, rng: random.Random) -> bool:
    with contextlib.suppress(OSError):
        connection = socket.create_connection((LOOPBACK, port), timeout=0.5)
        held.callback(connection.close)
        connection.sendall(HEAD[: rng.randrange(len(HEAD))])
        return True
    return False
