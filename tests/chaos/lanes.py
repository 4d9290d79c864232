"""Lanes inject faults in parallel; each injects its own one after another, spread over the available time."""

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
"""Delay of a thread that proves that the machine was stalled."""
BEAT_SECONDS = 0.1
STALLED = "machine stalled"


@dataclass
class Record:
    """The injected faults and the failures of a run, shared by all lanes."""

    strikes: list[Strike] = field(default_factory=list[Strike])
    alone: list[Strike] = field(default_factory=list[Strike])
    """The strikes during which no other fault was active."""
    failures: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, strike: Strike, *, alone: bool = False) -> None:
        """Add a strike."""
        with self._lock:
            self.strikes.append(strike)
            if alone:
                self.alone.append(strike)

    def fail(self, what: str) -> None:
        """Add a failure of the run and print it."""
        with self._lock:
            self.failures.append(what)
        sys.stdout.write(f"FAILED: {what}\n")
        sys.stdout.flush()

    @property
    def counts(self) -> Counter[str]:
        """Return the number of strikes by fault."""
        with self._lock:
            return Counter(strike.fault for strike in self.strikes)

    def count(self, first_words: str) -> int:
        """Return the number of strikes of the faults whose names begin with these words."""
        return sum(count for fault, count in self.counts.items() if fault.startswith(first_words))


class Lane:
    """Injects the faults `wanted` (fault → number of strikes) in a random order, each at its time."""

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
        """Start to inject; spread the strikes over `seconds`."""
        self._seconds = seconds
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` until all strikes are done, then cancel the rest. Record a fault that does not end."""
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
    """Inject one fault; an exception is recorded as a failure of the run, which continues."""
    try:
        record.add(nemesis.strike(rng), alone=alone)
    except Exception:
        record.fail(f"{nemesis.fault}: {traceback.format_exc()}")


class Pulse:
    """Records stalls of the machine as faults."""

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
