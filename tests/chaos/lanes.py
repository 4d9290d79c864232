"""Lanes: each injects its faults one after the other, spread over the time it has; all at once make the storm."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.chaos.nemesis import Nemesis, Strike

STALL_SECONDS = 1.0
"""A thread that wakes up this late was on a machine that stood still."""
BEAT_SECONDS = 0.1
STALLED = "machine stalled"


@dataclass
class Record:
    """What was injected, and what went wrong with the injecting; shared by all lanes."""

    strikes: list[Strike] = field(default_factory=list[Strike])
    alone: list[Strike] = field(default_factory=list[Strike])
    """Those of them that had the system to themselves."""
    failures: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, strike: Strike, *, alone: bool = False) -> None:
        """One more."""
        with self._lock:
            self.strikes.append(strike)
            if alone:
                self.alone.append(strike)

    def fail(self, what: str) -> None:
        """Something that must not be."""
        with self._lock:
            self.failures.append(what)
        sys.stdout.write(f"FAILED: {what}\n")
        sys.stdout.flush()

    @property
    def counts(self) -> Counter[str]:
        """Fault → strikes."""
        with self._lock:
            return Counter(strike.fault for strike in self.strikes)

    def count(self, first_words: str) -> int:
        """How many strikes of the faults that begin so."""
        return sum(count for fault, count in self.counts.items() if fault.startswith(first_words))


class Lane:
    """Injects `wanted` (fault → how often) in a shuffled order within `seconds`, each as soon as it is due."""

    def __init__(
        self, name: str, wanted: Mapping[str, int], nemeses: Mapping[str, Nemesis], seed: str, record: Record
    ) -> None:
        self.name = name
        self._rng = random.Random(f"{seed}/{name}")
        self._plan = [nemeses[fault] for fault, count in wanted.items() for _ in range(count)]
        self._rng.shuffle(self._plan)
        self._record = record
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._seconds = 0.0
        self.left = len(self._plan)

    def start(self, seconds: float) -> None:
        """Begin."""
        self._seconds = seconds
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until all is injected; what is left after `seconds` is not. A failure when one does not end at all."""
        self._thread.join(max(0.0, seconds))
        self._over.set()
        self._thread.join(120)
        if self._thread.is_alive():
            self._record.fail(f"{self.name}: a fault did not end")

    def _run(self) -> None:
        began = time.monotonic()
        step = self._seconds / max(1, len(self._plan))
        for number, nemesis in enumerate(self._plan):
            due = began + step * (number + self._rng.random())
            if self._over.wait(max(0.0, due - time.monotonic())):
                return
            inject(nemesis, self._rng, self._record)
            self.left -= 1


def inject(nemesis: Nemesis, rng: random.Random, record: Record, *, alone: bool = False) -> None:
    """One strike; an error of the injecting is a failure of the run, which goes on."""
    try:
        record.add(nemesis.strike(rng), alone=alone)
    except Exception:
        record.fail(f"{nemesis.fault}: {traceback.format_exc()}")


class Pulse:
    """Notices when the machine stands still: that too is a fault, and nobody's."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > STALL_SECONDS:
                self._record.add(Strike(STALLED, last, now, f"{now - last:.1f} s"))
            last = now
