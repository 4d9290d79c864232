"""Requests to running relays: reloads with other routes and slots, and floods of connections."""

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
"""A pattern that matches no further events, so that the events of a sink stay the same."""
SLOTS, FEWER_SLOTS = "max_in_flight = 32\n", "max_in_flight = 31\n"
"""Slots of the queue, whose sink is made again: a session with the other number follows beside its rows in flight."""
BETWEEN_SECONDS = (0.0, 1.0)
"""Time between two relays, in which both configurations are in use."""
LISTEN_SECONDS = 30.0
"""Time limit for a relay that joins to listen."""
CONNECTIONS = 400
FLOOD_SECONDS = (2.0, 5.0)
HEAD = b"GET /readyz HTTP/1.1\r\nHost: relay\r\n"


@dataclass
class Reload:
    """Reloads one relay after another. Every other strike adds a pattern and takes a slot, the next one reverses it."""

    fleet: Fleet
    fault: str = "reload"

    def strike(self, rng: random.Random) -> Strike:
        """Change all files, then send SIGHUP to every relay that answers."""
        began = time.monotonic()
        more = MORE not in self.fleet.guest.config.read_text()
        for relay in self.fleet.all:
            _write(relay, more)
        reloaded = 0
        for relay in self.fleet.all:
            if relay.runs and _listens(relay, 0.0 if relay in self.fleet.relays else LISTEN_SECONDS):
                relay.child.send_signal(signal.SIGHUP)
                reloaded += 1
            time.sleep(rng.uniform(*BETWEEN_SECONDS))  # a rollout takes its time
        return Strike(
            self.fault, began, time.monotonic(), f"{reloaded} relays, {'with' if more else 'without'} a pattern"
        )


def _listens(relay: Relay, seconds: float) -> bool:
    """Wait until a relay listens that may have read its file before it was changed; return False if it does not.

    Without a SIGHUP it would be superseded, and never get the shards that its own strike waits for.
    """
    with contextlib.suppress(NotInTime):
        until(lambda: relay.ask("/livez")[0] or not relay.runs, seconds=seconds, what=f"{relay.name} listens")
        return relay.runs
    return False


def _write(relay: Relay, more: bool) -> None:
    """Replace the file atomically, because a relay may read it at any time."""
    text = relay.config.read_text().replace(MORE, "").replace(FEWER_SLOTS, SLOTS)
    new = relay.config.with_suffix(".new")
    new.write_text(text.replace(ROUTE, ROUTE + MORE).replace(SLOTS, FEWER_SLOTS) if more else text)
    new.rename(relay.config)


@dataclass
class HealthFlood:
    """Opens connections to a relay's listener that send at most a part of a request, and keeps them open."""

    fleet: Fleet
    fault: str = "health flood"

    def strike(self, rng: random.Random) -> Strike:
        """Flood one relay for a while."""
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
