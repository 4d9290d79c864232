"""Faults of the destinations: the broker is killed or stopped, the receiver is killed, slow or silent."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from typing import Literal

from outbox_relay.workbench.embedded.process import ProcessFailed
from tests.chaos.nemesis import Strike
from tests.chaos.receiver import ReceiverProcess
from tests.support.kafka import KafkaBroker

START_TRIES = 5


@dataclass
class BrokerDown:
    """Kills or stops the broker and starts it again."""

    broker: KafkaBroker
    how: Literal["killed", "stopped"]

    @property
    def fault(self) -> str:
        """Return the kind of its strikes."""
        return f"broker {self.how}"

    def strike(self, rng: random.Random) -> Strike:
        """End the broker and start it again."""
        began = time.monotonic()
        if self.how == "killed":
            self.broker.kill()
        else:
            self.broker.stop()
        time.sleep(rng.uniform(0.0, 2.0))  # the fault itself: it lasts a little longer than a start
        self._start()
        return Strike(self.fault, began, time.monotonic())

    def _start(self) -> None:
        """Start the broker; try again if it does not answer in time on a busy machine."""
        for _ in range(START_TRIES - 1):
            with contextlib.suppress(ProcessFailed):
                return self.broker.start()
        return self.broker.start()


@dataclass
class ReceiverDown:
    """Kills the receiver, so that connections are refused for a while."""

    receiver: ReceiverProcess
    fault: str = "receiver down"

    def strike(self, rng: random.Random) -> Strike:
        """Kill the receiver and start it again."""
        began = self.receiver.kill()
        time.sleep(rng.uniform(0.5, 4.0))  # the fault itself
        self.receiver.start()
        return Strike(self.fault, began, time.monotonic())


@dataclass
class ReceiverMode:
    """Makes the receiver answer late or not at all."""

    receiver: ReceiverProcess
    mode: Literal["slow", "hanging"]

    @property
    def fault(self) -> str:
        """Return the kind of its strikes."""
        return f"receiver {self.mode}"

    def strike(self, rng: random.Random) -> Strike:
        """Change the mode for some seconds."""
        began = time.monotonic()
        self.receiver.set_mode(self.mode)
        time.sleep(rng.uniform(3.0, 7.0))  # the fault itself
        self.receiver.set_mode("well")
        return Strike(self.fault, began, time.monotonic())
