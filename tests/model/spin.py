"""Check every state of ``relay.pml`` with spin, in a run for each set of faults and each omitted rule."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).parent / "relay.pml"
PROGRAMS = ("spin", "cc")
MEGABYTES = 900
"""Memory limit of a run."""
DEPTH = 100_000
"""Limit for the length of a path in steps; a run fails if a path is longer."""
RUN_SECONDS = 600
CHECKER = ("-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}")

FAULTS: tuple[str, ...] = ("FAILS=1", "LAPSES=2", "ROW_LAPSES=1", "CRASHES=0", "RELEASES=0")
SOUND: dict[str, tuple[str, ...]] = {
    "lost leases, of shard and rows": FAULTS,
    "a crash after a lost lease": ("FAILS=1", "LAPSES=1", "ROW_LAPSES=0", "CRASHES=1", "RELEASES=0"),
    "a release after a lost lease": ("FAILS=1", "LAPSES=1", "ROW_LAPSES=0", "CRASHES=0", "RELEASES=1"),
}
"""Sets of faults, with their numbers, under which the model must hold in every state."""
BROKEN: dict[str, str] = {
    "NO_EPOCH_CHECK": "shard_epoch==epoch",
    "NO_SHARE_LOCK": "shard_epoch==epoch",
    "NO_EPOCH_RANK": "epoch>=ledger_epoch",
    "NO_BLOCKED_LOAD": "taken&",
    "NO_ROW_LEASE": "row_lease[row]==row_mine[me]",
    "NO_HEAD_RULE": "taken&",
    "NO_ASKING_AFTER": "taken&",
    "NO_OWN_CLOCK": "shard_owner==me",
    "NO_EPOCH_CHECK ONLY_CONSEQUENCES": "taken&",
    "NO_SHARE_LOCK ONLY_CONSEQUENCES": "taken&",
}
"""Omitted rule → the assertion that must then be violated; ``taken&`` is the order of a key."""


@dataclass(frozen=True)
class Checked:
    """Result of a run: the violated assertion, or None. ``whole`` is true if every state was visited."""

    violated: str | None
    whole: bool
    states: int
    megabytes: float
    seconds: float

    def __str__(self) -> str:
        found = f"violated: {self.violated}" if self.violated else "no error" if self.whole else "not finished"
        return f"{self.states:>9,} states  {self.megabytes:4.0f} MB  {self.seconds:5.1f} s  {found}"


def missing() -> Sequence[str]:
    """Return the required programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def check(definitions: Sequence[str]) -> Checked:
    """Check the model with these definitions until an error is found or every state was visited."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outbox-model-") as place:
        _run(place, "spin", "-a", *(f"-D{definition}" for definition in definitions), str(MODEL))
        _run(place, "cc", *CHECKER, "-o", "pan", "pan.c")
        said = _run(place, "./pan", f"-m{DEPTH}", "-w22")
    return _read(said, time.monotonic() - began)


def _run(place: str, *command: str) -> str:
    done = subprocess.run(
        command, cwd=place, check=False, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _read(said: str, seconds: float) -> Checked:
    violated = re.search(r"^pan:1: (?:assertion violated )?(.+?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    states, megabytes = re.search(r"(\S+) states, stored", said), re.search(r"(\S+)\s+total actual memory", said)
    if states is None or megabytes is None:
        raise RuntimeError(f"the checker did not say how many states it saw: {said}")
    whole = "errors: 0" in said and not re.search("search not completed|max search depth too small|out of memory", said)
    return Checked(violated[1] if violated else None, whole, int(float(states[1])), float(megabytes[1]), seconds)
