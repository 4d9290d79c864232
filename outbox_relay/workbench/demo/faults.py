"""The faults of a demo: what breaks, when it is repaired, and how soon events flow again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outbox_relay.relay.keeper import POLL_SECONDS
from outbox_relay.workbench.demo.parts import DemoParts
from outbox_relay.workbench.shop.processes import LEASE_SECONDS

DOWN_SECONDS = 3.0
"""Seconds for which the database, the broker or the receiver is broken."""
AGAIN_SECONDS = 5.0
"""Time after a repair in which events flow again."""
DEAD_SECONDS = 30.0
"""Time limit for refused events to become dead letters."""
REFUSED, FAILING = 400, 500
"""Statuses of the broken receiver: the first makes a dead letter at once, the second is tried again."""
DAMAGED = 5
"""Number of events of each kind."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a fault: times of its beginning and repair, in seconds since 1970, and dead letters."""

    began: float
    repaired: float
    dead: int = 0
    """Number of dead letters that the fault made, which were retried."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `inject` returns when it is repaired; events then flow again within `promised_seconds`."""

    clause: str
    inject: Callable[[DemoParts], Course]
    promised_seconds: float


def _kill_relay(parts: DemoParts) -> Course:
    at = time.time()
    parts.kill_relay()
    parts.say("relay-1 was killed with SIGKILL while it owned half of the shards; relay-3 replaces it")
    parts.add_relay("relay-3")
    return Course(at, at)


def _crash_database(parts: DemoParts) -> Course:
    began = time.time()
    parts.kill_database()
    parts.say(f"PostgreSQL was killed with SIGKILL, and starts again after {DOWN_SECONDS:g} s")
    time.sleep(DOWN_SECONDS)
    parts.start_database()
    return Course(began, time.time())


def _freeze_broker(parts: DemoParts) -> Course:
    began = time.time()
    parts.freeze_broker()
    parts.say(f"the broker does not answer for {DOWN_SECONDS:g} s")
    parts.wait(lambda: False, DOWN_SECONDS)
    parts.thaw_broker()
    return Course(began, time.time())


def _poison(parts: DemoParts) -> Course:
    began = time.time()
    parts.broken.touch()
    parts.database.place_damaged([REFUSED, FAILING] * DAMAGED)
    parts.say(f"the receiver answers {DAMAGED} events with {REFUSED} and {DAMAGED} with {FAILING}")
    before = parts.database.dead()
    parts.wait(lambda: parts.database.dead() >= before + DAMAGED, DEAD_SECONDS)
    dead = parts.database.dead() - before
    parts.broken.unlink()
    parts.retry_dead()
    parts.say(f"the receiver accepts them again; {dead} dead letters were retried with `outbox-relay dead retry`")
    return Course(began, time.time(), dead)


FAULTS: Mapping[str, Fault] = {
    "relay": Fault("a relay was killed with SIGKILL", _kill_relay, LEASE_SECONDS + POLL_SECONDS),
    "database": Fault("PostgreSQL was killed with SIGKILL and restarted", _crash_database, AGAIN_SECONDS),
    "broker": Fault("the broker did not answer for a while", _freeze_broker, AGAIN_SECONDS),
    "poison": Fault("the receiver refused some events for a while", _poison, AGAIN_SECONDS),
}
