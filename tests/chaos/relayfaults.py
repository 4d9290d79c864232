"""Faults of relays: killed, killed at a point, frozen beyond their lease, replaced, and with a shifted clock."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tests.chaos.fleet import Fleet, Relay
from tests.chaos.nemesis import Strike
from tests.chaos.relay_that_dies import SIGNALS, Point
from tests.support.wait import NotInTime, until

DIE_SECONDS = 8.0
"""Time limit for an armed relay to reach its point; it is killed afterwards."""
JOIN_SECONDS = 60.0
"""Time limit for a joining relay to get shards while others are killed every few seconds."""
NOT_JOINED = "not joined"
"""Kind of a strike whose relay had no shards within that time."""
NOTICE_SECONDS = 30.0
"""Time limit for a relay to log that it was frozen, on a busy machine."""
NOTICED = ("shards.lost", "sink.restarted")
"""Ends of log events by which a relay reports an expired lease or a restarted session."""
HOUR_SECONDS = 3600.0
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@dataclass
class Kill:
    """Kills a random relay at a random moment; it is restarted immediately."""

    fleet: Fleet
    fault: str = "sigkill"

    def strike(self, rng: random.Random) -> Strike:
        """Kill one relay."""
        with self.fleet.borrowed(rng) as relay:
            at = relay.kill()
        return Strike(self.fault, at, at, relay.name)


@dataclass
class KillAt:
    """Makes a relay kill itself at a point: after an acknowledgement or inside a settlement."""

    fleet: Fleet
    point: Point

    @property
    def fault(self) -> str:
        """Return the kind of its strikes."""
        return f"sigkill {self.point}"

    def strike(self, rng: random.Random) -> Strike:
        """Arm a relay and wait until it has died."""
        with self.fleet.borrowed(rng) as relay:
            relay.child.send_signal(SIGNALS[self.point])
            died = relay.child.wait_for(DIE_SECONDS) == -signal.SIGKILL
            at = time.monotonic()
            if not died:
                assert relay.runs, f"{relay.name} ended with {relay.child.code} on its way to a point"
                relay.kill()
        return Strike(self.fault if died else "sigkill", at, at, relay.name)


@dataclass
class KillAfterClaim:
    """Makes a joining relay kill itself when it has claimed its first shards and read nothing."""

    fleet: Fleet
    fault: str = "sigkill after claim"

    def strike(self, rng: random.Random) -> Strike:  # noqa: ARG002 - there is nothing to choose
        """Let a relay join and die."""
        with self.fleet.invited() as guest:
            guest.start("after claim")
            died = guest.child.wait_for(JOIN_SECONDS) == -signal.SIGKILL
            at = time.monotonic()
            if not died:
                assert guest.runs, f"a relay that joined ended with {guest.child.code}: {guest.log.read_text()[-2000:]}"
                guest.kill()
        return Strike(self.fault if died else "sigkill", at, at, guest.name)


@dataclass
class Zombie:
    """Stops a relay by SIGSTOP for longer than its lease, so that others take its shards; it must notice this."""

    fleet: Fleet
    lease_seconds: float
    fault: str = "zombie"
    unnoticed: list[str] = field(default_factory=list[str])
    """Relays that owned shards and did not notice that they were frozen."""

    def strike(self, rng: random.Random) -> Strike:
        """Freeze a relay, resume it, and check if it notices."""
        with self.fleet.borrowed(rng) as relay:
            owned = relay.shards()
            mark = relay.log.stat().st_size
            began = time.monotonic()
            relay.child.send_signal(signal.SIGSTOP)
            time.sleep(self.lease_seconds * rng.uniform(1.4, 2.5))  # the fault itself: it lasts this long
            relay.child.send_signal(signal.SIGCONT)
            healed = time.monotonic()
            if owned and not self._notices(relay, mark):
                self.unnoticed.append(f"{relay.name} at {began:.3f}, {owned} shards")
        return Strike(self.fault, began, healed, f"{relay.name}, {owned} shards")

    def _notices(self, relay: Relay, mark: int) -> bool:
        try:
            until(
                lambda: not relay.runs or any(line["event"] in NOTICED for line in relay.said(mark)),
                seconds=NOTICE_SECONDS,
                what="the relay notices",
            )
        except AssertionError:
            return False
        return True


@dataclass
class Replace:
    """Stops a relay by SIGTERM and replaces it. It must end with 0 and cause no duplicates."""

    fleet: Fleet
    fault: str = "sigterm"

    def strike(self, rng: random.Random) -> Strike:
        """Replace one relay."""
        with self.fleet.borrowed(rng) as relay:
            began = time.monotonic()
            relay.stop()
        return Strike(self.fault, began, time.monotonic(), relay.name)


@dataclass
class JoinAndLeave:
    """Lets another relay join, get shards and leave. It must cause no duplicates."""

    fleet: Fleet
    fault: str = "join and leave"

    def strike(self, rng: random.Random) -> Strike:
        """Let a relay join and leave."""
        with self.fleet.invited() as guest:
            began = time.monotonic()
            guest.start()
            joined = _has_joined(guest)
            time.sleep(rng.uniform(0.5, 3.0))  # it works for a while
            guest.stop()
        return Strike(self.fault if joined else NOT_JOINED, began, time.monotonic())


@dataclass
class ShiftedClock:
    """Runs a relay whose wall clock is an hour ahead or behind.

    It serves only the webhook. librdkafka waits by `cnd_timedwait`, whose clock libfaketime does not shift, and would
    wait for an hour. The receiver refuses its signatures.
    """

    fleet: Fleet
    fault: str = "clock shifted"

    def strike(self, rng: random.Random) -> Strike:
        """Let such a relay run for a while."""
        assert FAKETIME.exists(), f"{FAKETIME} is missing: install Debian's package faketime"
        shift = rng.choice(["+1h", "-1h"])
        with self.fleet.estranged() as relay:
            began = time.monotonic()
            try:
                joined = self._work(relay, rng, shift)
            finally:
                if relay.runs:
                    relay.kill()
        return Strike(self.fault if joined else NOT_JOINED, began, time.monotonic(), shift)

    def _work(self, relay: Relay, rng: random.Random, shift: str) -> bool:
        """Let the relay work for a while, and return True if it had shards."""
        mark = relay.log.stat().st_size
        relay.start_under({"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "DONT_FAKE_MONOTONIC": "1"})
        joined = _has_joined(relay)
        time.sleep(rng.uniform(6.0, 12.0))  # it works for a while
        logged = datetime.fromisoformat(relay.said(mark)[-1]["time"]).timestamp()
        assert abs(abs(time.time() - logged) - HOUR_SECONDS) < HOUR_SECONDS / 10, "its clock was not shifted"
        relay.stop()
        return joined


def _has_joined(relay: Relay) -> bool:
    """Wait until a relay that joins has shards or has ended; return False if it has none after `JOIN_SECONDS`.

    While the database is struck every few seconds, its session may begin again and again. That is no fault of the
    relay, and how many may do so is limited by `NOT_JOINED_SHARE`.
    """
    try:
        until(lambda: relay.shards() or not relay.runs, seconds=JOIN_SECONDS, what="a relay that joined has shards")
    except NotInTime:
        return False
    return True
