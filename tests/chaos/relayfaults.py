"""What happens to relays: killed, killed at a point, frozen beyond their lease, replaced in order, on another clock."""

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
from tests.support.wait import until

DIE_SECONDS = 8.0
"""How long a relay that is to die at a point may take to get there; then it is killed where it is."""
JOIN_SECONDS = 60.0
"""How long a relay that joins may take to get shards while others are killed every few seconds."""
NOTICE_SECONDS = 30.0
"""How long a relay that was frozen may take to notice, on a machine that is busy."""
NOTICED = ("lost shards", "starting again from the ledger", "starts again")
"""What a relay logs that has noticed that its lease ran out, or that its session cannot go on."""
HOUR_SECONDS = 3600.0
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@dataclass
class Kill:
    """SIGKILL to any relay at any moment; another takes its place at once."""

    fleet: Fleet
    fault: str = "sigkill"

    def strike(self, rng: random.Random) -> Strike:
        """Kill one."""
        with self.fleet.borrowed(rng) as relay:
            at = relay.kill()
        return Strike(self.fault, at, at, relay.name)


@dataclass
class KillAt:
    """SIGKILL by the relay itself at a point of its work: after an acknowledgement, inside a settlement."""

    fleet: Fleet
    point: Point

    @property
    def fault(self) -> str:
        """The kind of its strikes."""
        return f"sigkill {self.point}"

    def strike(self, rng: random.Random) -> Strike:
        """Arm one, and wait until it is dead."""
        with self.fleet.borrowed(rng) as relay:
            relay.child.send(SIGNALS[self.point])
            died = relay.child.wait(DIE_SECONDS) == -signal.SIGKILL
            at = time.monotonic()
            if not died:
                assert relay.runs, f"{relay.name} ended with {relay.child.code} on its way to a point"
                relay.kill()
        return Strike(self.fault if died else "sigkill", at, at, relay.name)


@dataclass
class KillAfterClaim:
    """A relay joins and dies when it has claimed its first shards, before it has read anything."""

    fleet: Fleet
    fault: str = "sigkill after claim"

    def strike(self, rng: random.Random) -> Strike:  # noqa: ARG002 - there is nothing to choose
        """Let one join and die."""
        with self.fleet.invited() as guest:
            guest.start("after claim")
            died = guest.child.wait(JOIN_SECONDS) == -signal.SIGKILL
            at = time.monotonic()
            if not died:
                assert guest.runs, f"a relay that joined ended with {guest.child.code}: {guest.log.read_text()[-2000:]}"
                guest.kill()
        return Strike(self.fault if died else "sigkill", at, at, guest.name)


@dataclass
class Zombie:
    """SIGSTOP for longer than the lease, then SIGCONT: others have its shards, and it must notice."""

    fleet: Fleet
    lease_seconds: float
    fault: str = "zombie"
    unnoticed: list[str] = field(default_factory=list[str])
    """Those that owned shards, were frozen, and went on as if nothing had been."""

    def strike(self, rng: random.Random) -> Strike:
        """Freeze one, let it go on, and look whether it notices."""
        with self.fleet.borrowed(rng) as relay:
            owned = relay.shards()
            mark = relay.log.stat().st_size
            began = time.monotonic()
            relay.child.send(signal.SIGSTOP)
            time.sleep(self.lease_seconds * rng.uniform(1.4, 2.5))  # the fault itself: it lasts this long
            relay.child.send(signal.SIGCONT)
            healed = time.monotonic()
            if owned and not self._notices(relay, mark):
                self.unnoticed.append(f"{relay.name} at {began:.3f}, {owned} shards")
        return Strike(self.fault, began, healed, f"{relay.name}, {owned} shards")

    def _notices(self, relay: Relay, mark: int) -> bool:
        try:
            until(
                lambda: not relay.runs or any(line["event"].endswith(NOTICED) for line in relay.said(mark)),
                seconds=NOTICE_SECONDS,
                what="the relay notices",
            )
        except AssertionError:
            return False
        return True


@dataclass
class Replace:
    """SIGTERM to one relay after the other, each replaced when it has ended, with 0; must repeat nothing."""

    fleet: Fleet
    fault: str = "sigterm"

    def strike(self, rng: random.Random) -> Strike:
        """Replace one."""
        with self.fleet.borrowed(rng) as relay:
            began = time.monotonic()
            relay.stop()
        return Strike(self.fault, began, time.monotonic(), relay.name)


@dataclass
class JoinAndLeave:
    """One more relay joins, gets its share and leaves; must repeat nothing."""

    fleet: Fleet
    fault: str = "join and leave"

    def strike(self, rng: random.Random) -> Strike:
        """Let one come and go."""
        with self.fleet.invited() as guest:
            began = time.monotonic()
            guest.start()
            until(lambda: guest.shards() or not guest.runs, seconds=JOIN_SECONDS, what="a relay that joined has shards")
            time.sleep(rng.uniform(0.5, 3.0))  # it works for a while
            guest.stop()
        return Strike(self.fault, began, time.monotonic())


@dataclass
class ShiftedClock:
    """A relay whose wall clock is an hour off, in the one or the other direction.

    It serves the webhook alone: librdkafka waits by `cnd_timedwait`, whose clock libfaketime leaves as it is, and would
    wait for an hour. The receiver refuses what it signs.
    """

    fleet: Fleet
    fault: str = "clock shifted"

    def strike(self, rng: random.Random) -> Strike:
        """Let one work for a while."""
        assert FAKETIME.exists(), f"{FAKETIME} is missing: install Debian's package faketime"
        shift = rng.choice(["+1h", "-1h"])
        with self.fleet.estranged() as relay:
            began = time.monotonic()
            try:
                self._work(relay, rng, shift)
            finally:
                if relay.runs:
                    relay.kill()
        return Strike(self.fault, began, time.monotonic(), shift)

    def _work(self, relay: Relay, rng: random.Random, shift: str) -> None:
        mark = relay.log.stat().st_size
        relay.start_under({"LD_PRELOAD": str(FAKETIME), "FAKETIME": shift, "DONT_FAKE_MONOTONIC": "1"})
        until(lambda: relay.shards() or not relay.runs, seconds=JOIN_SECONDS, what="a relay that joined has shards")
        time.sleep(rng.uniform(6.0, 12.0))  # it works for a while
        logged = datetime.fromisoformat(relay.said(mark)[-1]["time"]).timestamp()
        assert abs(abs(time.time() - logged) - HOUR_SECONDS) < HOUR_SECONDS / 10, "its clock was not shifted"
        relay.stop()
